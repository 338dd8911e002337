"""`curriculum.toml` as objects: phases of units of tasks, each with its clauses."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

MANIFEST = "curriculum.toml"
_PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = _PACKAGE / "course"
"""The course as an installed wheel has it. A clone has no such folder."""
KINDS = ("plan", "move", "hide", "use")


class CurriculumError(ValueError):
    """The manifest cannot be used, or does not know what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step to take. `number` is its place on the path, `id` never changes.

    `kind` is "plan" (a pure function), "move" (messages), "hide" (cost) or "use".
    `processes` says what each rank needs a process of its own for; only real ranks can
    then judge the task.
    """

    number: str
    id: str
    title: str
    minutes: int
    difficulty: int
    needs: tuple[str, ...]
    points: int
    clauses: dict[str, str]
    advice: dict[str, str] = field(default_factory=dict)  # on a clause that fails
    milestone: str = ""
    kind: str = "move"
    stretch: bool = False  # off the path: for whoever wants more
    time_limit_s: float = 10.0
    processes: str = ""
    excused: dict[str, str] = field(default_factory=dict)  # standing clause → reason
    build: str = ""  # the time table's words for it
    reading_minutes: int = 0

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
    builds: str = ""  # what it has to build from messages alone: no collectives then
    preload: tuple[str, ...] = ()  # what each rank would import or do by itself

    def template(self, root: Path) -> Path:
        """The file that the learner fills in."""
        return root / self.folder / f"template_{self.name}.py"

    def solution(self, root: Path) -> Path:
        """The complete implementation."""
        return root / "solutions" / self.folder / f"{self.name}.py"

    def guide(self, root: Path) -> Path:
        """The page of the guide that explains it."""
        return root / self.folder / "guide" / f"{self.name}.md"

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
class Route:
    """A part of the path for one aim; `tasks` are ids, in the order of the path."""

    name: str
    title: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The whole path, and the folder it was read from."""

    root: Path
    phases: tuple[Phase, ...]
    routes: tuple[Route, ...] = ()

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
        """The task called `name`: a number, an id, a task's name or a part of an id.

        Raises:
            CurriculumError: no task is called that, or more than one.
        """
        for attribute in ("number", "id", "name"):
            found = [t for t in self.tasks if getattr(t, attribute) == name]
            if found:
                break
        else:
            # "1" is a phase, not the 1 in "stage1"
            usable = name and not name.isdecimal()
            found = [t for t in self.tasks if usable and name in t.id]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{t.number} {t.id}" for t in found)
            raise CurriculumError(f"{name!r} could be any of: {several}")
        last = self.tasks[-1].number
        raise CurriculumError(
            f"no task is called {name!r}; there are 1.1 … {last}, see `distlab status`"
        )

    def tasks_of(self, phase: int) -> list[Task]:
        """The tasks of a phase in the order of the path.

        Raises:
            CurriculumError: there is no such phase.
        """
        units = {unit.name for unit in self.phase(phase).units}
        return [task for task in self.tasks if task.unit in units]

    def route(self, name: str) -> Route:
        """The route with this name.

        Raises:
            CurriculumError: there is none.
        """
        for route in self.routes:
            if route.name == name:
                return route
        known = ", ".join(route.name for route in self.routes)
        raise CurriculumError(f"no route is called {name!r}; there is {known}")

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
    """Find the course: the nearest folder upward of `start` that holds the manifest.

    Without `start`, we look from the working directory upward, and fall back on the
    course that came with distlab.

    Raises:
        CurriculumError: there is no course, or the working directory was removed.
    """
    try:
        place = (start or Path.cwd()).resolve()
    except FileNotFoundError:
        raise CurriculumError(
            "the folder you are in is gone; go to the course's folder"
        ) from None
    for folder in (place, *place.parents):
        if (folder / MANIFEST).is_file():
            return folder
    if start is None and (installed_course() / MANIFEST).is_file():
        return installed_course()
    raise CurriculumError(f"no {MANIFEST} here or above: run this inside the course")


def installed_course() -> Path:
    """Return the course that came with distlab: its clone, or the wheel's copy."""
    return BUNDLED if (BUNDLED / MANIFEST).is_file() else _PACKAGE.parent


def load_curriculum(root: Path | None = None) -> Curriculum:
    """Read the manifest.

    Raises:
        CurriculumError: it is missing, is not TOML, or lacks something; one sentence.
    """
    root = root or find_root()
    path = root / MANIFEST
    try:
        phases, routes = _contents(path.read_text(encoding="utf-8"))
        curriculum = Curriculum(root=root, phases=phases, routes=routes)
        _validate(curriculum)
    except OSError as error:
        raise CurriculumError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CurriculumError(f"{path} is not valid TOML: {error}") from error
    except CurriculumError as error:
        raise CurriculumError(f"{path}: {error}") from None
    return curriculum


@lru_cache(maxsize=4)
def _contents(text: str) -> tuple[tuple[Phase, ...], tuple[Route, ...]]:
    """What a manifest says; the same text is not taken apart twice."""
    data = tomllib.loads(text)
    phases = tuple(map(_phase, _tables(data, "phase")))
    return phases, tuple(map(_route, _tables(data, "route")))


def _phase(data: dict[str, Any]) -> Phase:
    folder = _value(data, "folder", str)
    return Phase(
        number=_value(data, "number", int),
        title=_value(data, "title", str),
        folder=folder,
        units=tuple(_unit(unit, folder) for unit in _tables(data, "unit")),
    )


def _route(data: dict[str, Any]) -> Route:
    return Route(
        name=_value(data, "name", str),
        title=_value(data, "title", str),
        tasks=tuple(_value(data, "tasks", list)),
    )


def _unit(data: dict[str, Any], folder: str) -> Unit:
    return Unit(
        name=_value(data, "name", str),
        summary=_value(data, "summary", str),
        folder=folder,
        tasks=tuple(map(_task, _tables(data, "task"))),
        builds=_value(data, "builds", str, ""),
        preload=tuple(_value(data, "preload", list, [])),
    )


def _task(data: dict[str, Any]) -> Task:
    return Task(
        number=_value(data, "number", str),
        id=_value(data, "id", str),
        title=_value(data, "title", str),
        minutes=_value(data, "minutes", int),
        difficulty=_value(data, "difficulty", int),
        needs=tuple(_value(data, "needs", list)),
        points=_value(data, "points", int),
        clauses=_value(data, "clauses", dict),
        advice=_value(data, "advice", dict, {}),
        milestone=_value(data, "milestone", str, ""),
        kind=_value(data, "kind", str, "move"),
        stretch=_flag(data, "stretch"),
        time_limit_s=float(_value(data, "time_limit_s", int | float, 10)),
        processes=_value(data, "processes", str, ""),
        excused=_value(data, "excused", dict, {}),
        build=_value(data, "build", str),
        reading_minutes=_value(data, "reading_minutes", int),
    )


def _tables(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = data.get(key, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise CurriculumError(f"[[{key}]] is not a list of tables")
    return found


def _value(data: dict[str, Any], key: str, kind: Any, default: Any = None) -> Any:
    value = data.get(key, default)
    names = (data.get(name) for name in ("id", "name", "title"))
    entry = next((name for name in names if name), "an entry")
    if value is None:
        raise CurriculumError(f"{entry} lacks {key!r}")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CurriculumError(f"{key!r} of {entry} cannot be {value!r}")
    return value


def _flag(data: dict[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise CurriculumError(f"{key!r} of {data.get('id')} is not true or false")
    return value


def _validate(curriculum: Curriculum) -> None:
    units = [unit for phase in curriculum.phases for unit in phase.units]
    names = [f"unit {unit.name}" for unit in units]
    names += [f"phase {phase.number}" for phase in curriculum.phases]
    for name in names:
        if names.count(name) > 1:
            raise CurriculumError(f"there are two of {name}")
    tasks = [task for unit in units for task in unit.tasks]
    if not tasks:
        raise CurriculumError("there is no task in it")
    for task in tasks:
        if not re.fullmatch(r"\d+\.\d+", task.number):
            raise CurriculumError(f"{task.number!r} of {task.id} is not like 1.4")
        if not re.fullmatch(r"\w+\.\w+", task.id):
            raise CurriculumError(f"{task.id!r} is not like unit.task")
        if task.kind not in KINDS:
            raise CurriculumError(f"{task.kind!r} of {task.id} is no kind of task")
        if task.minutes < 1 or task.time_limit_s <= 0:
            raise CurriculumError(f"{task.id} has no time")
    _validate_path(curriculum)


def _validate_path(curriculum: Curriculum) -> None:
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
    _validate_routes(curriculum)


def _validate_routes(curriculum: Curriculum) -> None:
    known = {task.id for task in curriculum.tasks}
    for route in curriculum.routes:
        for name in route.tasks:
            if name not in known:
                raise CurriculumError(f"route {route.name} has no task {name}")


def _place(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))
