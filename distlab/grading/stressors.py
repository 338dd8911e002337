"""The table task × stressor: each is proved by a wrong solution, or excused.

A stressor is a condition under which a solution fails that is right in the common
case. An entry of the catalogue that fails only under one names it, as in
`stressor = "twice"`. Which tasks a stressor asks nothing of stands with the reason in
`tests/mutants/stressors.toml`:

    [[excused]]
    tasks = ["ring_allreduce.chunk_bounds", "ring_allreduce.segment_plan"]
    stressors = ["strided", "dtype"]
    why = "Bounds are numbers: no tensor is handed over or returned."
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlab.curriculum import Curriculum
from distlab.grading.catalogue import RECORDS, STRESSORS, CatalogueError, Entry

NAME = "stressors.toml"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One task under one stressor: the entries that prove it, or why there are none."""

    task: str
    stressor: str
    entries: tuple[str, ...] = ()
    why: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with it, as a sentence; or nothing."""
        where = f"{self.task} × {self.stressor}"
        if not self.entries and not self.why:
            return f"{where}: no entry proves it, and it is not excused"
        if self.entries and self.why:
            return f"{where}: excused, although {self.entries[0]} proves it"
        return ""


def stressor_table(curriculum: Curriculum, entries: Iterable[Entry]) -> list[Cell]:
    """Every task under every stressor, in the order of the path.

    Raises:
        CatalogueError: an excuse is not usable; one sentence that names it.
    """
    proofs: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for stressor in entry.stressor.split():
            proofs.setdefault((entry.task, stressor), []).append(entry.id)
    excuses = _excuses(curriculum)
    return [
        Cell(
            task=task.id,
            stressor=stressor,
            entries=tuple(proofs.get((task.id, stressor), ())),
            why=excuses.get((task.id, stressor), ""),
        )
        for task in curriculum.tasks
        for stressor in STRESSORS
    ]


def _excuses(curriculum: Curriculum) -> Mapping[tuple[str, str], str]:
    path = curriculum.root / RECORDS / NAME
    excuses: dict[tuple[str, str], str] = {}
    tasks = {task.id for task in curriculum.tasks}
    for number, row in enumerate(_rows(path), start=1):
        where = f"{NAME}: excuse {number}"
        if row.keys() != {"tasks", "stressors", "why"}:
            raise CatalogueError(f"{where}: it has tasks, stressors and why, no more")
        for task in row["tasks"]:
            if task not in tasks:
                raise CatalogueError(f"{where}: there is no task {task!r}")
            for stressor in row["stressors"]:
                if stressor not in STRESSORS:
                    raise CatalogueError(f"{where}: there is no stressor {stressor!r}")
                if (task, stressor) in excuses:
                    raise CatalogueError(f"{where}: {task} × {stressor} is repeated")
                excuses[task, stressor] = str(row["why"])
    return excuses


def _rows(path: Path) -> list[dict[str, list[str]]]:
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("excused", [])
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path} cannot be read: {error}") from error
    assert isinstance(rows, list)
    return rows
