"""How good a learner's tests are: which wrong solutions of the catalogue they catch.

A test is played with the solutions of each task whose function it names. It counts if
it passes with every right one: the reference, and those of the catalogue. A wrong one
is caught if a test that counts fails with it. `unseen.toml`
beside the catalogue names what no test on simulated ranks can see, with the reason.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.curriculum import (
    Curriculum,
    CurriculumError,
    Unit,
    UnitSource,
    read_source,
)
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import travelling
from distlab.grading.catalogue import RECORDS, Entry, read_catalogue
from distlab.grading.stage import play_tests
from distlab.runner import Cluster, Limits

REFERENCE = "reference"
SEED = 20
_PREFIX = "test_"
_MOST_S = 600.0  # for all solutions together; each test has a limit as well
_UNITS = ("collectives", "ring_allreduce")

Job = tuple[str, dict[str, str], list[str]]
"""A solution's name, its text as it travels, and the tests that it is played with."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the tests of a file did with the solutions of a unit.

    `refused` maps a test that does not count to the right solution with which it fails
    and what it said then; `caught` maps a wrong solution to the test that catches it.
    """

    tests: tuple[str, ...]
    wrong: tuple[Entry, ...]
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    caught: dict[str, str] = field(default_factory=dict)

    @property
    def escaped(self) -> tuple[Entry, ...]:
        """The wrong solutions that no test catches."""
        return tuple(entry for entry in self.wrong if entry.id not in self.caught)


def units_with_tests(curriculum: Curriculum) -> tuple[Unit, ...]:
    """The units that tests can be written for."""
    return tuple(curriculum.units[name] for name in _UNITS)


def tests_in(source: UnitSource) -> tuple[str, ...]:
    """The names of its test functions, in order.

    Raises:
        SourceError: it is not valid Python.
    """
    nodes = (node for node in source.tree.body if isinstance(node, ast.FunctionDef))
    return tuple(node.name for node in nodes if node.name.startswith(_PREFIX))


def tasks_named(
    source: UnitSource, functions: Mapping[str, Sequence[str]]
) -> dict[str, frozenset[str]]:
    """Of each test the tasks of which it names a function, in code or in a text."""
    found = {}
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith(_PREFIX):
            inner = [*ast.walk(node)][1:]
            words = {n.attr for n in inner if isinstance(n, ast.Attribute)}
            words |= {str(n.value) for n in inner if isinstance(n, ast.Constant)}
            tasks = (task for task, names in functions.items() if words & {*names})
            found[node.name] = frozenset(tasks)
    return found


def read_tests(unit: Unit, path: Path) -> UnitSource:
    """The learner's test file of a unit.

    Raises:
        CurriculumError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CurriculumError(f"cannot read {path}: {error}") from error
    return UnitSource(unit.name, "file", path, text, unit.builds)


def read_unseen(curriculum: Curriculum, unit: str) -> dict[str, str]:
    """What no test on simulated ranks can see, by id, with the reason."""
    path = curriculum.root / RECORDS / "unseen.toml"
    table: dict[str, dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table.get(unit, {})


def score(
    curriculum: Curriculum,
    cluster: Cluster,
    unit: Unit,
    tests: UnitSource,
    *,
    task: str = "",
    on_step: Callable[[str], None] = lambda _: None,
) -> Score:
    """Play the tests with every solution of the unit, or with those of one task.

    Raises:
        CurriculumError: there is no catalogue, or no test in the file.
        SourceError: the file is not valid Python.
    """
    names = tests_in(tests)
    if not names:
        raise CurriculumError(f"{tests.path} has no function called {_PREFIX}…")
    unseen = read_unseen(curriculum, unit.name)
    entries = [
        entry
        for entry in read_catalogue(curriculum, unit=unit.name)
        if task in ("", entry.task) and entry.id not in unseen
    ]
    reference = read_source(curriculum, unit, "reference")
    right = [entry for entry in entries if not entry.is_mutant]
    # A test need not call under every stressor: what fails only under one is left out.
    wrong = tuple(e for e in entries if e.is_mutant and not e.stressor)
    named = tasks_named(tests, functions_of(reference.text))
    chosen = [name for name in names if not task or task in named[name]]

    def job(entry: Entry, usable: Sequence[str]) -> Job:
        text = {**travelling(reference), "text": entry.applied_to(reference.text)}
        return entry.id, text, [name for name in usable if entry.task in named[name]]

    on_step("right solutions")
    jobs = [(REFERENCE, travelling(reference), chosen)]
    refused: dict[str, tuple[str, str]] = {}
    jobs += [job(entry, chosen) for entry in right]
    for (id_, name), said in _play(cluster, tests, jobs, to_the_end=True).items():
        if said:
            refused.setdefault(name, (id_, said))
    on_step("wrong solutions")
    counting = [name for name in chosen if name not in refused]
    caught: dict[str, str] = {}
    jobs = [job(entry, counting) for entry in wrong]
    for (id_, name), said in _play(cluster, tests, jobs).items():
        if said:
            caught.setdefault(id_, name)
    return Score(tests=names, wrong=wrong, refused=refused, caught=caught)


def _play(
    cluster: Cluster,
    tests: UnitSource,
    jobs: Sequence[Job],
    *,
    to_the_end: bool = False,
) -> dict[tuple[str, str], str]:
    """What each test said of each solution; "" where it passed.

    All are played in one process. A solution that ends the process has failed, and the
    rest goes on in a new one.
    """
    said: dict[tuple[str, str], str] = {}
    left = [job for job in jobs if job[2]]
    while left:
        open_: list[tuple[str, str]] = []

        def hear(rank: int, report: Any, open_: list[Any] = open_) -> None:
            id_, name, text = report
            if text is None:
                open_[:] = [(id_, name)]
            else:
                open_.clear()
                said[id_, name] = text

        run = cluster.run(
            play_tests,
            1,
            travelling(tests),
            [list(job) for job in left],
            SEED,
            to_the_end,
            limits=Limits(seconds=_MOST_S),
            on_report=hear,
            journal=False,
        )
        if run.outcome == "finished":
            break
        if not open_:
            run.require_finished()  # it died before it began: no solution's fault
        id_, name = open_[0]
        said[id_, name] = run.explanation
        left = left[[job[0] for job in left].index(id_) + 1 :]
    return said
