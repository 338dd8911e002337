"""The tables of tasks in the texts, which `distlab templates` writes from the manifest.

The time table of a phase is written whole. In `docs/contents.md` a row describes a unit
in words of its own, so only its numbers and its minutes come from the manifest. In the
README it's the number of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distlab.curriculum.manifest import Curriculum, Phase, Task

_HEAD = """\
| task | what you build | keyboard minutes | reading minutes |
|---|---|---|---|
"""
_UNIT = re.compile(r"^\| [\d., –]+ \| `(\w+)`(.*) \| \d+ \|$", re.MULTILINE)
_STRETCH = re.compile(
    r"^\| [\d., –]+ \| \d+ stretch tasks(.*) \| \d+ \|$", re.MULTILINE
)
_ALL_TASKS = re.compile(r"(?<=\ball )\d+(?= tasks\b)|\d+(?= short tasks\b)")


def fill_time_table(text: str, phase: Phase) -> str:
    """Return a phase's guidelines with the time table of the manifest."""
    before, head, rest = text.partition(_HEAD)
    if not head:
        return text
    after = re.sub(r"\A(?:\|.*\n)*", "", rest)
    tasks = _sorted(task for unit in phase.units for task in unit.tasks)
    core = [task for task in tasks if not task.stretch]
    table = [
        *map(_row, tasks),
        _sums("core tasks", core),
        _sums("with the stretch tasks", tasks),
    ]
    return "".join([before, head, *table, after])


def _row(task: Task) -> str:
    anchor = f"{task.number}-{task.id}".replace(".", "")
    build = task.build + " (stretch)" * task.stretch
    return (
        f"| {task.number} [`{task.id}`](guide/{task.unit}.md#{anchor}) | {build} "
        f"| {task.minutes} | {task.reading_minutes} |\n"
    )


def _sums(name: str, tasks: Sequence[Task]) -> str:
    minutes = sum(task.minutes for task in tasks)
    reading = sum(task.reading_minutes for task in tasks)
    return f"| **{name}** | | {minutes} | {reading} |\n"


def fill_contents(text: str, curriculum: Curriculum) -> str:
    """Return the page of all units with the numbers and minutes of the manifest."""

    def unit(match: re.Match[str]) -> str:
        name, words = match.groups()
        core = [task for task in curriculum.units[name].tasks if not task.stretch]
        return _described(core, f"`{name}`{words}")

    def stretch(match: re.Match[str]) -> str:
        tasks = [task for task in curriculum.tasks if task.stretch]
        return _described(tasks, f"{len(tasks)} stretch tasks{match[1]}")

    return _STRETCH.sub(stretch, _UNIT.sub(unit, text))


def _described(tasks: Sequence[Task], words: str) -> str:
    minutes = sum(task.minutes for task in tasks)
    return f"| {_numbers_of(tasks)} | {words} | {minutes} |"


def _numbers_of(tasks: Iterable[Task]) -> str:
    """Return the numbers of some tasks, as in `1.1–1.4, 1.14`."""
    runs: list[list[tuple[int, int]]] = []
    for place in map(_place, _sorted(tasks)):
        if runs and place == (runs[-1][-1][0], runs[-1][-1][1] + 1):
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = []
    for run in runs:
        numbers = [f"{major}.{minor}" for major, minor in run]
        parts += [f"{numbers[0]}–{numbers[-1]}"] if len(numbers) > 2 else numbers
    return ", ".join(parts)


def fill_readme(text: str, curriculum: Curriculum) -> str:
    """Return the README with the manifest's number of tasks."""
    return _ALL_TASKS.sub(str(len(curriculum.tasks)), text)


def _sorted(tasks: Iterable[Task]) -> list[Task]:
    return sorted(tasks, key=_place)


def _place(task: Task) -> tuple[int, int]:
    major, minor = task.number.split(".")
    return int(major), int(minor)
