"""`curriculum.toml` as objects: phases of units of tasks, each with its clauses."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

MANIFEST = "curriculum.toml"


class CurriculumError(ValueError):
    """The manifest cannot be used, or does not know what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One hole to fill. `number` is its place on the path, `id` never changes."""

    number: str
    id: str
    title: str
    minutes: int
    difficulty: int
    needs: tuple[str, ...]
    points: int
    clauses: dict[str, str]
    milestone: str = ""
    time_limit_s: float = 10.0

    @property
    def unit(self) -> str:
        """The unit it belongs to: the first half of its id."""
        return self.id.partition(".")[0]

    @property
    def name(self) -> str:
        """Its own name: the second half of its id."""
        return self.id.partition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One template, one solution, one file of hints."""

    name: str
    summary: str
    folder: str
    tasks: tuple[Task, ...]

    def template(self, root: Path) -> Path:
        """The file that the learner fills in."""
        return root / self.folder / f"template_{self.name}.py"

    def solution(self, root: Path) -> Path:
        """The complete implementation."""
        return root / "solutions" / self.folder / f"{self.name}.py"

    def hints(self, root: Path) -> Path:
        """The hints of all its tasks."""
        return root / self.folder / "hints" / f"{self.name}.md"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A quarter of the course."""

    number: int
    title: str
    folder: str
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The whole path, and the folder it was read from."""

    root: Path
    phases: tuple[Phase, ...]

    @cached_property
    def units(self) -> dict[str, Unit]:
        """All units by name."""
        return {unit.name: unit for phase in self.phases for unit in phase.units}

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks in the order of the path."""
        tasks = [task for unit in self.units.values() for task in unit.tasks]
        return tuple(sorted(tasks, key=lambda task: _place(task.number)))

    def task(self, name: str) -> Task:
        """The task called `name`: a number, an id, a task's name or the start of one.

        Raises:
            CurriculumError: no task is called that, or more than one.
        """
        for attribute in ("number", "id", "name"):
            found = [t for t in self.tasks if getattr(t, attribute) == name]
            if found:
                break
        else:
            found = [t for t in self.tasks if name and name in t.id]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{t.number} {t.id}" for t in found)
            raise CurriculumError(f"{name!r} could be any of: {several}")
        last = self.tasks[-1].number
        raise CurriculumError(
            f"no task is called {name!r}; there are 1.1 … {last}, see `distlab status`"
        )

    def phase(self, number: int) -> Phase:
        """The phase with this number.

        Raises:
            CurriculumError: there is none.
        """
        for phase in self.phases:
            if phase.number == number:
                return phase
        known = ", ".join(str(phase.number) for phase in self.phases)
        raise CurriculumError(f"there is no phase {number}; there is {known}")


def find_root(start: Path | None = None) -> Path:
    """The repository: the nearest folder upward of `start` that holds the manifest.

    Without `start` the working directory is tried first, then distlab's own checkout.

    Raises:
        CurriculumError: neither is in a checkout of the course.
    """
    places = [start] if start else [Path.cwd(), Path(__file__)]
    for place in places:
        for folder in (place.resolve(), *place.resolve().parents):
            if (folder / MANIFEST).is_file():
                return folder
    raise CurriculumError(f"no {MANIFEST} here or above: run this inside the course")


def load_curriculum(root: Path | None = None) -> Curriculum:
    """Read the manifest.

    Raises:
        CurriculumError: it is missing, is not TOML, or lacks something; one sentence.
    """
    root = root or find_root()
    path = root / MANIFEST
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise CurriculumError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise CurriculumError(f"{path} is not valid TOML: {error}") from error
    try:
        curriculum = Curriculum(root=root, phases=tuple(map(_phase, data["phase"])))
    except KeyError as error:
        raise CurriculumError(f"{path}: an entry lacks {error}") from error
    _validate(curriculum)
    return curriculum


def _phase(data: dict[str, Any]) -> Phase:
    units = tuple(_unit(unit, data["folder"]) for unit in data.get("unit", []))
    return Phase(
        number=data["number"], title=data["title"], folder=data["folder"], units=units
    )


def _unit(data: dict[str, Any], folder: str) -> Unit:
    return Unit(
        name=data["name"],
        summary=data["summary"],
        folder=folder,
        tasks=tuple(_task(task) for task in data.get("task", [])),
    )


def _task(data: dict[str, Any]) -> Task:
    return Task(
        number=data["number"],
        id=data["id"],
        title=data["title"],
        minutes=data["minutes"],
        difficulty=data["difficulty"],
        needs=tuple(data["needs"]),
        points=data["points"],
        clauses=data["clauses"],
        milestone=data.get("milestone", ""),
        time_limit_s=data.get("time_limit_s", 10.0),
    )


def _validate(curriculum: Curriculum) -> None:
    seen: set[str] = set()
    for task in curriculum.tasks:
        unit = curriculum.units.get(task.unit)
        if unit is None or task not in unit.tasks:
            raise CurriculumError(f"task {task.id} stands under another unit")
        for name in (task.id, task.number):
            if name in seen:
                raise CurriculumError(f"{name} is used by two tasks")
            seen.add(name)
        for need in task.needs:
            if need not in seen:
                raise CurriculumError(f"{task.id} needs {need}, which is not before it")
        if not task.clauses:
            raise CurriculumError(f"{task.id} has no clauses")


def _place(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))
