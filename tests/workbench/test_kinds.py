"""The table task × kind of scenario: every cell is filled once."""

import tomllib
from collections import Counter
from collections.abc import Iterator

from distlab.grading.catalogue import RECORDS
from tests.workbench.judging import CURRICULUM as COURSE

TABLE = tomllib.loads((COURSE.root / RECORDS / "kinds.toml").read_text("utf-8"))
STATES = {"has", "free", "open"}
UNITS = {
    unit: [task.id for task in COURSE.tasks if task.unit == unit]
    for unit in dict.fromkeys(task.unit for task in COURSE.tasks)
}

EARLY = [task.id for task in COURSE.tasks if int(task.number.split(".")[0]) < 4]


def _cells(kind: str) -> Iterator[str]:
    """The tasks that the rows of a kind fill."""
    rows = [row for row in TABLE["row"] if row["kind"] == kind]
    named = [name for row in rows for name in row["tasks"]]
    for name in named:
        unit = name.removesuffix(".*")
        if name == "*":
            whole = {n.removesuffix(".*") for n in named}
            rest = [t for t in EARLY if t.partition(".")[0] not in whole]
            yield from (t for t in rest if t not in named)
        elif unit in UNITS:
            yield from (t for t in UNITS[unit] if t not in named)
        else:
            yield name


def test_each_cell_is_filled_once() -> None:
    for kind in TABLE["kinds"]:
        filled = Counter(_cells(kind))
        missing = [task.id for task in COURSE.tasks if not filled[task.id]]
        twice = [task for task, count in filled.items() if count > 1]
        assert not missing, f"{kind}: {missing}"
        assert not twice, f"{kind}: {twice}"


def test_rows_name_what_exists() -> None:
    tasks = {task.id for task in COURSE.tasks} | {f"{unit}.*" for unit in UNITS} | {"*"}
    for row in TABLE["row"]:
        assert row.keys() == {"kind", "state", "tasks", "why"}, row
        assert row["kind"] in TABLE["kinds"], row
        assert row["state"] in STATES, row
        assert {*row["tasks"]} <= tasks, row
        assert row["why"], row
