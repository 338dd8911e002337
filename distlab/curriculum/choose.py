"""Whose code stands for a unit, task by task: the learner's own or the reference's.

A unit that is used by something larger (a training, a notebook) need not be finished:
what is missing, or was set to the reference with `distlab use`, is grafted in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

from distlab.curriculum.manifest import Curriculum, CurriculumError, Task, Unit
from distlab.curriculum.path import passed_tasks
from distlab.curriculum.progress import Progress
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import SourceError, UnitSource, load_graft, read_source
from distlab.paths import shown

Side = Literal["mine", "reference", "auto"]
SIDES: tuple[Side, ...] = get_args(Side)
OVERRIDE = "DISTLAB_IMPL"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One task's functions: whose they are (`mine` or `reference`), and why."""

    task: str
    number: str
    whose: Literal["mine", "reference"]
    why: str
    digest: str

    def line(self, width: int = 27) -> str:
        """`1.4   collectives.all_reduce   yours   3fa2…`, and why if it is not.

        `width` is the room for the task's name.
        """
        whose = {"mine": "yours", "reference": "reference"}[self.whose]
        head = f"{self.number:<5} {self.task:<{width}} {whose:<10}"
        return f"{head} {self.digest}  {self.why}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A unit's code as it is used; `grafts` are the tasks filled by the reference."""

    source: UnitSource
    reference: UnitSource
    grafts: tuple[str, ...]
    parts: tuple[Part, ...]

    def load(self) -> ModuleType:
        """The module to call."""
        return load_graft(self.source, self.reference, self.grafts)

    def lines(self) -> list[str]:
        """A line for each task: what the first cell of a notebook prints."""
        return [part.line() for part in self.parts]


def chosen_unit(curriculum: Curriculum, unit: str, default: Side = "auto") -> Choice:
    """The code of `unit`: DISTLAB_IMPL, else what `distlab use` says, else `default`.

    "mine" is the learner's wherever there is something, "auto" wherever it has passed
    and still does; the rest is the reference's.

    Raises:
        CurriculumError: there is no such unit, or DISTLAB_IMPL is no side.
        SourceError: a file cannot be read, or the learner's, where it is demanded, is
            no Python.
    """
    known = curriculum.units.get(unit)
    if known is None:
        raise CurriculumError(
            f"no unit is called {unit!r}; there are {', '.join(curriculum.units)}"
        )
    progress = Progress(curriculum.root)
    reference = read_source(curriculum, known, "reference")
    sides = {task.id: side_of(progress, task, default) for task in known.tasks}
    mine: UnitSource | None = None
    unusable = ""
    if set(sides.values()) != {"reference"}:
        try:
            mine = read_source(curriculum, known, "mine")
            mine.tree  # noqa: B018 - to see whether it is Python
        except SourceError as error:
            if "mine" in sides.values():
                message = f"{shown(error.path)}: {error}"
                raise SourceError(message, error.path, error.line) from error
            mine, unusable = None, str(error)
    passed = passed_tasks(curriculum, progress)
    parts = tuple(
        _part(task, sides[task.id], mine, reference, passed, unusable)
        for task in known.tasks
    )
    theirs = tuple(part.task for part in parts if part.whose == "reference")
    if mine is None or len(theirs) == len(parts):
        return Choice(source=reference, reference=reference, grafts=(), parts=parts)
    return Choice(source=mine, reference=reference, grafts=theirs, parts=parts)


def side_of(progress: Progress, task: Task, default: Side = "auto") -> Side:
    """What counts for one task: its own setting, else its unit's, else `default`.

    Raises:
        CurriculumError: DISTLAB_IMPL is set to something else.
    """
    forced = os.environ.get(OVERRIDE, "")
    if forced:
        return as_side(forced, OVERRIDE)
    kept = progress.read().get("use", {})
    for name in (task.id, task.unit):
        if kept.get(name) in SIDES:
            side: Side = kept[name]
            return side
    return default


def as_side(text: str, what: str = "the side") -> Side:
    """`text` as one of the three sides.

    Raises:
        CurriculumError: it is none.
    """
    for side in SIDES:
        if text == side:
            return side
    raise CurriculumError(f"{what} must be mine, reference or auto, not {text!r}")


def names_to_set(curriculum: Curriculum, names: list[str]) -> list[str]:
    """The units and tasks that are meant, as ids; without names, all units.

    Raises:
        CurriculumError: something is called neither.
    """
    if not names:
        return list(curriculum.units)
    found = []
    for name in names:
        if name in curriculum.units:
            found.append(name)
            continue
        try:
            found.append(curriculum.task(name).id)
        except CurriculumError as error:
            units = ", ".join(curriculum.units)
            raise CurriculumError(f"{error}; units are {units}") from None
    return found


def settings_for(
    curriculum: Curriculum, kept: dict[str, str], names: list[str], side: Side
) -> dict[str, str | None]:
    """What to keep: a unit's setting takes those of its tasks away."""
    changed: dict[str, str | None] = {}
    for name in names:
        unit: Unit | None = curriculum.units.get(name)
        if unit:
            changed |= {task.id: None for task in unit.tasks if task.id in kept}
        changed[name] = side
    return changed


def _part(
    task: Task,
    side: Side,
    mine: UnitSource | None,
    reference: UnitSource,
    passed: set[str],
    unusable: str,
) -> Part:
    functions = functions_of(reference.text)[task.id]
    why = ""
    if side == "reference":
        why = "as set"
    elif mine is None:
        why = unusable
    else:
        state, _ = mine.state_of(task.id, functions)
        if state != "started":
            why = {"not_started": "not started"}.get(state, "not in your file")
        elif side == "auto" and task.id not in passed:
            why = "yours hasn't passed"
    owner = reference if why or mine is None else mine
    return Part(
        task=task.id,
        number=task.number,
        whose="reference" if owner is reference else "mine",
        why=why,
        digest=owner.function_digest(functions),
    )
