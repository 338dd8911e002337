"""Is every assertion of the checks needed? Each is taken out; a verdict must change.

An assertion is a statement in `distlab/grading/checks/` or `kit/` that may end a check:
a failure that is raised or returned, an `expect_…` or `judge` call, a run of which only
the end counts. First every wrong solution of the catalogue is graded, and it is written
down which assertions spoke. Then each of them is replaced by `pass`, and wrong
solutions on which it spoke are graded again: if no verdict changes (passed, clause,
name or sentence), the assertion is idle.

So "needed" is proved by a changed verdict. "Silent" only says that no wrong solution of
the catalogue has made it speak.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Literal
from unittest import mock

from distlab.curriculum import Curriculum
from distlab.grading import checks
from distlab.grading.catalogue import Entry
from distlab.grading.clause import Check, Judge
from distlab.grading.grade import Grader
from distlab.grading.mutants import SEED
from distlab.grading.verdict import ClauseVerdict, NotJudgedError, NotYetError
from distlab.runner import Cluster

FOLDER = Path(checks.__file__).parents[1]
PARTS = ("checks", "kit")
TRIES = 4  # wrong solutions that are graded again for one assertion
_FAILURES = ("NotYetError", "NotJudgedError")
Verdict = tuple[tuple[str, str, str, str], ...]
State = Literal["needed", "idle", "silent"]


@dataclass(frozen=True, order=True)
class Site:
    """One assertion, in lines `first` to `last` of a file, named as from FOLDER."""

    file: str
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Finding:
    """What became of one assertion; `entry` is a wrong solution that shows it."""

    site: Site
    state: State
    entry: str = ""


def sites_of(path: Path) -> list[Site]:
    """The assertions of one file, in order."""
    tree = ast.parse(_text(path))
    return sorted(
        Site(
            _name_of(path),
            node.lineno,
            node.end_lineno or node.lineno,
            " ".join(ast.unparse(node).split())[:60],
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and _is_assertion(node)
    )


def _name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix() if _is_ours(path) else path.name


def _is_ours(path: Path) -> bool:
    return any(FOLDER / part in path.parents for part in PARTS)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _is_assertion(node: ast.stmt) -> bool:
    failure = None
    if isinstance(node, ast.Raise | ast.Return):
        failure = node.exc if isinstance(node, ast.Raise) else node.value
    if isinstance(failure, ast.Call):
        return _name(failure) in _FAILURES
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name(node.value)
        return name.lstrip("_").startswith("expect_") or name in ("finished", "judge")
    return False


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


# ── what a grader hears ─────────────────────────────────────────────────────────────


class _Listening(Grader):
    """Writes down through which lines of the checks each failure came."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.heard: set[tuple[str, int]] = set()

    def _judge_clause(
        self, task: Any, check: Check, *values: Any
    ) -> tuple[ClauseVerdict, bool]:
        listening = replace(check, judge=self._listen(check.judge))
        return super()._judge_clause(task, listening, *values)

    def _standing(self, *_values: Any) -> Iterator[ClauseVerdict]:
        return iter(())  # what is asked of every task is no assertion of a check

    def _whose_part(self, *_values: Any) -> str:
        return ""  # another judgement, of other code

    def _listen(self, judge: Judge) -> Judge:
        @functools.wraps(judge)
        def listen(*values: Any) -> str | None:
            try:
                return judge(*values)
            except (NotYetError, NotJudgedError) as failure:
                for error in _chain(failure):  # one that was changed by `but`, too
                    self.heard |= {*_lines(error.__traceback__)}
                    self.heard |= {*getattr(error, "made_at", ())}
                raise

        return listen


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _lines(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if _is_ours(path):
            yield _name_of(path), trace.tb_lineno
        trace = trace.tb_next


@contextmanager
def _origins() -> Iterator[None]:
    """Within the block each failure knows where it was made, not only where raised."""
    init = NotYetError.__init__

    def noting(self: Any, *values: Any, **named: Any) -> None:
        init(self, *values, **named)
        frame, self.made_at = sys._getframe(1), []
        while frame.f_back is not None:
            path = Path(frame.f_code.co_filename)
            if _is_ours(path):
                self.made_at.append((_name_of(path), frame.f_lineno))
            frame = frame.f_back

    with mock.patch.object(NotYetError, "__init__", noting):
        yield


class Ablation:
    """Grades wrong solutions with all assertions, and again without one of them."""

    def __init__(self, curriculum: Curriculum, cluster: Cluster, folder: Path) -> None:
        self._curriculum, self._cluster, self._folder = curriculum, cluster, folder
        self._before: dict[str, Verdict] = {}  # by entry
        # Which entries spoke: by file and line.
        self._spoke: dict[str, dict[int, list[Entry]]] = defaultdict(
            partial(defaultdict, list)
        )

    def verdict(self, entry: Entry) -> tuple[Verdict, set[tuple[str, int]]]:
        """Each clause's status, name and sentence; and the lines that spoke."""
        unit = self._curriculum.units[entry.unit]
        path = self._folder / f"{entry.id}_{unit.name}.py"
        solution = unit.solution(self._curriculum.root).read_text(encoding="utf-8")
        path.write_text(entry.applied_to(solution), encoding="utf-8")
        task = self._curriculum.task(entry.task)
        grader = _Listening(self._curriculum, self._cluster, code=str(path), seed=SEED)
        verdict = grader.grade([task]).tasks[0]
        said = [(c.id, str(c.status), c.slug, c.message) for c in verdict.clauses]
        return (*said, ("", verdict.status, "", "")), grader.heard

    def find(
        self, entries: Sequence[Entry], on_finding: Callable[[Finding], None]
    ) -> list[Finding]:
        """One finding for each assertion in the files that these entries reach.

        We report on a unit's checks once its entries are graded, and on `kit`, which
        all units share, last.
        """
        findings: list[Finding] = []
        for unit, own in groupby(entries, key=attrgetter("unit")):
            with _origins():
                for entry in own:
                    self._before[entry.id], heard = self.verdict(entry)
                    for file, line in heard:
                        self._spoke[file][line].append(entry)
            files = {f for f in self._spoke if f.startswith(f"checks/{unit}/")}
            findings += self._look(files, on_finding)
        seen = {finding.site.file for finding in findings}
        return [*findings, *self._look(self._spoke.keys() - seen, on_finding)]

    def _look(
        self, files: Collection[str], on_finding: Callable[[Finding], None]
    ) -> Iterator[Finding]:
        for site in _sites(files):
            lines = range(site.first, site.last + 1)
            spoke = self._spoke[site.file]
            finding = self._finding(site, [e for n in lines for e in spoke.get(n, ())])
            on_finding(finding)
            yield finding

    def _finding(self, site: Site, loud: list[Entry]) -> Finding:
        if not loud:
            return Finding(site, "silent")
        with _without(site):
            for entry in loud[:: max(1, len(loud) // TRIES)]:
                if self.verdict(entry)[0] != self._before[entry.id]:
                    return Finding(site, "needed", entry.id)
        return Finding(site, "idle", loud[0].id)


def ablate(
    curriculum: Curriculum,
    cluster: Cluster,
    entries: Iterable[Entry],
    on_finding: Callable[[Finding], None],
) -> list[Finding]:
    """Take out each assertion that the entries' checks have, one at a time."""
    for path in (p for part in PARTS for p in (FOLDER / part).rglob("*.py")):
        _text(path)  # as it is imported below: it may be edited while this runs
    wrong = [entry for entry in entries if entry.is_mutant and not entry.limit_s]
    with tempfile.TemporaryDirectory(prefix="distlab-ablation-") as folder:
        return Ablation(curriculum, cluster, Path(folder)).find(wrong, on_finding)


def _sites(files: Iterable[str]) -> list[Site]:
    return [site for file in sorted(files) for site in sites_of(FOLDER / file)]


# ── taking one out ──────────────────────────────────────────────────────────────────


class _TakeOut(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace the statement at the site by pass."""
        at = (getattr(node, "lineno", 0), getattr(node, "end_lineno", 0))
        is_here = at == (self._site.first, self._site.last)
        if is_here and isinstance(node, ast.stmt) and _is_assertion(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


@contextmanager
def _without(site: Site) -> Iterator[None]:
    """Within the block the checks run as if this assertion were not there.

    Only the functions' code is exchanged: the checks stay registered as they are.
    """
    path = FOLDER / site.file
    tree = ast.parse(_text(path))
    _TakeOut(site).visit(tree)
    changed = _codes(compile(ast.fix_missing_locations(tree), str(path), "exec"))
    old = [
        (function, function.__code__)
        for function in _functions(path)
        if not site.first <= function.__code__.co_firstlineno <= site.last
    ]  # a lambda passed to the assertion disappears with it
    try:
        for function, code in old:
            function.__code__ = changed[_key(code)]
        yield
    finally:
        for function, code in old:
            function.__code__ = code


def _functions(path: Path) -> list[FunctionType]:
    """All functions of a file, those inside a decorator's wrapper among them."""
    return [
        found
        for found in gc.get_objects()
        if type(found) is FunctionType and found.__code__.co_filename == str(path)
    ]


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    found = {_key(code): code}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _codes(constant)
    return found


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
