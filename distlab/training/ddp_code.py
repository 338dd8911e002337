"""Choose whose loader and trainer the ranks run; check that the tasks are finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlab.curriculum import (
    Curriculum,
    SourceError,
    Task,
    Unit,
    UnitSource,
    load_curriculum,
    read_source,
)
from distlab.curriculum.choose import Choice, chosen_unit
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import travelling
from distlab.grading.parts import parts_used

_ENTRIES = {
    "trainer": ("fit", ("trainer.fit",)),
    "data_loader": (
        "DistributedDataLoader.__init__",
        ("data_loader.shard_indices", "data_loader.sampler", "data_loader.loader"),
    ),
}
"""The function that we call in each unit, and the tasks that it always needs."""

EVALUATE = "trainer.evaluate"
"""Measures the model after each epoch; the reference's until the learner's is
written."""


def choose_units(code: tuple[str, ...]) -> dict[str, Choice]:
    """Return the code of both units.

    `code` is "reference", "mine", or files that hold one unit each. If it is empty,
    `distlab use` decides, task by task.

    Raises:
        ValueError: a file can't be read or holds neither unit, or a task that the
            training needs isn't finished.
    """
    curriculum = load_curriculum()
    if not code:
        return {name: chosen_unit(curriculum, name) for name in _ENTRIES}
    sides = [side for side in code if side in ("mine", "reference")]
    if len(sides) > 1:
        raise ValueError(f"--code {sides[0]} and --code {sides[1]}: choose one of them")
    side = sides[0] if sides else "reference"
    sources = {
        name: _read(curriculum, curriculum.units[name], side) for name in _ENTRIES
    }
    for path in code:
        if path not in sides:
            source = _of_file(curriculum, path)
            sources[source.unit] = source
    _require_finished(curriculum, sources)
    return {name: _choice(curriculum, source) for name, source in sources.items()}


def choose_saver() -> dict[str, Choice]:
    """Return the unit that saves and loads checkpoints, as `distlab use` says.

    Raises:
        SourceError: you ask for the learner's file, but it isn't valid Python.
    """
    return {"fault_tolerance": chosen_unit(load_curriculum(), "fault_tolerance")}


def _choice(curriculum: Curriculum, source: UnitSource) -> Choice:
    unit = curriculum.units[source.unit]
    reference = read_source(curriculum, unit, "reference")
    functions = functions_of(reference.text).get(EVALUATE)
    if functions is None or source.state_of(EVALUATE, functions)[0] == "started":
        return Choice(source=source, reference=source, grafts=(), parts=())
    return Choice(source=source, reference=reference, grafts=(EVALUATE,), parts=())


def evaluates_itself(units: Mapping[str, Choice]) -> bool:
    """Return True if the ranks evaluate with the same code that trains."""
    return EVALUATE not in units["trainer"].grafts


def as_parts(unit: Choice) -> dict[str, Any]:
    """Return a unit's code in the form in which we send it to the ranks."""
    return {
        "source": travelling(unit.source),
        "reference": travelling(unit.reference),
        "grafts": list(unit.grafts),
    }


def whose(units: Mapping[str, Choice]) -> tuple[str, ...]:
    """Return, as in `--code`, whose tasks the training runs in both units."""
    mine: list[str] = []
    theirs: list[str] = []
    for name, choice in units.items():
        entries = _ENTRIES[name][1] + (EVALUATE,) * (name == "trainer")
        needed = _needed(choice, entries)
        for part in choice.parts:
            if part.task in needed:
                (mine if part.whose == "mine" else theirs).append(part.number)
    if mine and theirs:
        return f"mine {' '.join(mine)}", f"reference {' '.join(theirs)}"
    return ("mine",) if mine else ("reference",)


def _needed(choice: Choice, entries: tuple[str, ...]) -> set[str]:
    functions = functions_of(choice.reference.text)
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        task = waiting.pop()
        found.add(task)
        owner = choice.reference if task in choice.grafts else choice.source
        waiting += set(parts_used(owner.tree, task, functions)) - found
    return found


def is_reference(code: tuple[str, ...]) -> bool:
    """Return True if none of the learner's code runs."""
    return set(code) <= {"reference"}


def _read(curriculum: Curriculum, unit: Unit, code: str) -> UnitSource:
    try:
        source = read_source(curriculum, unit, code)
        _ = source.tree
    except SourceError as error:
        raise ValueError(f"{error.path}: {error}") from error
    return source


def _of_file(curriculum: Curriculum, path: str) -> UnitSource:
    for name, (entry, _tasks) in _ENTRIES.items():
        source = _read(curriculum, curriculum.units[name], path)
        if not source.missing((entry,)):
            return source
    names = " nor ".join(entry.partition(".")[0] for entry, _ in _ENTRIES.values())
    raise ValueError(f"--code {path}: the file has neither {names}")


def _require_finished(
    curriculum: Curriculum, sources: Mapping[str, UnitSource]
) -> None:
    unfinished: list[Task] = []
    for source in sources.values():
        if source.side != "reference":
            unfinished += _unfinished(curriculum, source)
    if unfinished:
        names = ", ".join(f"{task.number} {task.id}" for task in unfinished)
        raise ValueError(f"the training needs tasks you haven't written yet: {names}")


def _unfinished(curriculum: Curriculum, source: UnitSource) -> list[Task]:
    unit = curriculum.units[source.unit]
    functions = functions_of(read_source(curriculum, unit, "reference").text)

    def is_open(task: str) -> bool:
        return source.state_of(task, functions[task])[0] != "started"

    needed = set(_ENTRIES[source.unit][1])
    for task in tuple(needed):
        # What an unwritten function will build on is the manifest's guess.
        if is_open(task):
            needed |= _all_needs(curriculum, task)
        else:
            needed |= set(parts_used(source.tree, task, functions))
    return [task for task in unit.tasks if task.id in needed and is_open(task.id)]


def _all_needs(curriculum: Curriculum, name: str) -> set[str]:
    found = set(curriculum.task(name).needs)
    return found.union(*(_all_needs(curriculum, need) for need in found))
