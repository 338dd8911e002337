"""The catalogue of hostile and broken submissions, read and checked.

They stand in `tests/hostile/<topic>.toml`:

    [[case]]
    id = "HO01"
    task = "collectives.exchange"
    title = "ends its process as if all were well"
    status = "fail"              # pass, fail, not_started or error
    slug = "rank-died"           # the diagnosis, where it matters
    says = "exit status 0"       # what the verdict, its rule or its evidence must say
    body = '''...'''             # replaces the solution's own body of the task

Instead of `body`: `helper` (code at the end of the right solution's file), `text` (the
whole file) or `file` (something that is no text at all, see `FILES`). Also possible:
`worlds` (rank counts, [2] if not given), `limit_s` (of one run, 5) and `needs`. With
`rank` and `call` it is a hang: the evidence must have that rank wait in that call, at
the line of the submission that is marked `# HERE`.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distlab.grading import landlock

FOLDER = Path("tests") / "hostile"
_STATUSES = ("pass", "fail", "not_started", "error")
_SOURCES = ("body", "helper", "text", "file")


class HostileError(ValueError):
    """A case of the catalogue cannot be used; the message names file and case."""


@dataclass(frozen=True, kw_only=True)
class HostileCase:
    """One submission, and what is true about it."""

    id: str
    task: str
    title: str
    status: str
    slug: str | None = None
    says: str = ""
    body: str = ""
    helper: str = ""
    text: str = ""
    file: str = ""
    worlds: tuple[int, ...] = (2,)
    limit_s: float = 5.0
    needs: str = ""
    rank: int = 0
    call: str = ""

    def obstacle(self) -> str:
        """Why this case cannot be played here, or nothing."""
        if self.needs == "linux" and not sys.platform.startswith("linux"):
            return "memory of ranks is not capped here: not contained"
        if self.needs == "user" and os.geteuid() == 0:
            return "root may read every file"
        known = landlock.version()
        if self.needs == "landlock" and known < 2:
            return "this kernel has no Landlock: not contained"
        if (self.needs == "scopes" and known < 6) or (
            self.needs == "no scopes" and known >= 6
        ):
            return f"this kernel has version {known} of Landlock"
        return ""


def read_cases(folder: Path) -> list[HostileCase]:
    """Every case of the folder's files.

    Raises:
        HostileError: one is not usable.
    """
    cases: list[HostileCase] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise HostileError(f"{path.name} is not valid TOML: {error}") from error
        cases += [_case(row, path.name) for row in data.get("case", [])]
    doubles = {c.id for c in cases if sum(c.id == other.id for other in cases) > 1}
    if doubles:
        raise HostileError(f"{min(doubles)} is used by two cases")
    return cases


# ── what may stand in place of a file ───────────────────────────────────────────────


def _unreadable(path: Path) -> None:
    path.write_text("secret = 1\n", encoding="utf-8")
    path.chmod(0)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "directory": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "endless": _endless,
    "loop": lambda path: path.symlink_to(path.name),
    "latin1": lambda path: path.write_bytes("# grün\n".encode("latin-1")),
    "nulls": lambda path: path.write_bytes(b"x = 1\n\0\0\0\n"),
    "huge": lambda path: path.write_bytes(b"x = 1\n" * 900_000),
    "deep": lambda path: path.write_bytes(b"x = " + b"(" * 5000 + b")" * 5000),
    "unreadable": _unreadable,
}


# ── one case, checked ───────────────────────────────────────────────────────────────


def _case(row: dict[str, Any], file: str) -> HostileCase:
    where = f"{file}: {row.get('id', 'a case')}"
    known = {field.name for field in fields(HostileCase)}
    for key in ("id", "task", "title", "status"):
        if key not in row:
            raise HostileError(f"{where}: {key} is missing")
    unknown = sorted(set(row) - known)
    if unknown:
        raise HostileError(f"{where}: {unknown[0]} means nothing here")
    if not re.fullmatch(r"H[A-Z]\d{2}", row["id"]):
        raise HostileError(f"{where}: the id must look like HO01")
    if row["status"] not in _STATUSES:
        raise HostileError(f"{where}: {row['status']!r} is not a status")
    if not any(row.get(key) for key in _SOURCES):
        raise HostileError(f"{where}: there is nothing to hand in")
    if row.get("file") and row["file"] not in FILES:
        raise HostileError(f"{where}: {row['file']!r} is not a kind of file")
    return HostileCase(**{**row, "worlds": tuple(row.get("worlds", (2,)))})
