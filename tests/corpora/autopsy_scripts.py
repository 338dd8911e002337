"""The scripts in `autopsy`, and what a report on each has to say.

Each script is one that an engineer might have, and runs by itself under torchrun. The
scripts in `hangs` have one fault each, planted after a public report. The scripts in
`right` have none, however slow or unusual they look.

The end of a script's docstring is its header: how many ranks it wants, and for a hang
also the report, the kind of fault, the ranks that a report must name, and what plain
torchrun does (`hang` until its timeout, or `error` with a message from gloo).

    Report: https://github.com/pytorch/pytorch/issues/54059
    Ranks: 2
    Kind: mismatch
    Guilty: 0
    Plain: hang

The lines where ranks get stuck are marked, so nobody counts lines: `# HERE 0,2: send`
says that ranks 0 and 2 end up here, in a send. A call `apart` is none at all: the rank
is in code of its own.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "autopsy"
KINDS = ("deadlock", "mismatch", "absent", "apart")
ENDS = ("hang", "error")
APART = "apart"

_FIELD = re.compile(r"^([A-Z][a-z]+): (.+)$", re.MULTILINE)
_MARK = re.compile(r"# HERE ([\d,]+): (\w+)")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A line where `ranks` end up, and the call they wait in there."""

    line: int
    ranks: frozenset[int]
    call: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of the corpus; `kind`, `report` and `plain` are empty for a right one.

    `guilty` are the ranks that a report has to name. A guilty rank without a mark has
    left the program or cannot be pinned to a line.
    """

    path: Path
    title: str
    world_size: int
    kind: str = ""
    report: str = ""
    plain: str = ""
    guilty: frozenset[int] = frozenset()
    marks: tuple[Mark, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, without its extension."""
        return self.path.stem

    @property
    def hangs(self) -> bool:
        """Whether a fault is planted here."""
        return bool(self.kind)

    def marks_of(self, rank: int) -> list[Mark]:
        """The lines where this rank may end up."""
        return [mark for mark in self.marks if rank in mark.ranks]


def read(path: Path) -> Script:
    """Read a script's header and marks.

    Raises:
        ValueError: a field is missing or isn't one of the words it may be.
    """
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    fields: dict[str, str] = dict(_FIELD.findall(docstring))
    try:
        script = Script(
            path=path,
            title=docstring.partition("\n")[0],
            world_size=int(fields["Ranks"]),
            kind=fields.get("Kind", ""),
            report=fields["Report"] if "Kind" in fields else "",
            plain=fields["Plain"] if "Kind" in fields else "",
            guilty=_ranks(fields["Guilty"]) if "Kind" in fields else frozenset(),
            marks=tuple(_marks(text)),
        )
    except KeyError as error:
        raise ValueError(f"{path.name}: the header lacks {error}") from None
    _check(script)
    return script


def _ranks(text: str) -> frozenset[int]:
    return frozenset(int(rank) for rank in text.split(","))


def _marks(text: str) -> list[Mark]:
    return [
        Mark(line=number, ranks=_ranks(found[1]), call=found[2])
        for number, line in enumerate(text.splitlines(), 1)
        if (found := _MARK.search(line))
    ]


def _check(script: Script) -> None:
    if not script.hangs:
        return
    if script.kind not in KINDS or script.plain not in ENDS:
        raise ValueError(f"{script.path.name}: {script.kind}, {script.plain}?")
    named = script.guilty.union(*(mark.ranks for mark in script.marks))
    if not script.marks or not script.guilty or max(named) >= script.world_size:
        raise ValueError(f"{script.path.name}: which ranks, and on which lines?")


def scripts(folder: str) -> list[Script]:
    """All scripts in `hangs` or in `right`, by name."""
    return [read(path) for path in sorted((FOLDER / folder).glob("*.py"))]
