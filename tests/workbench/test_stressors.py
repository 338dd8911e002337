"""The table task × stressor: no cell is empty, and a cell that is would be named."""

from dataclasses import replace
from pathlib import Path

import pytest

from distlab.grading.catalogue import RECORDS, CatalogueError
from distlab.grading.stressors import NAME, Cell, stressor_table
from tests.workbench.judging import CURRICULUM as COURSE
from tests.workbench.judging import catalogue

ENTRIES = [*catalogue().values()]


def test_each_task_meets_each_stressor_or_is_excused() -> None:
    faults = [cell.fault for cell in stressor_table(COURSE, ENTRIES) if cell.fault]
    assert not faults, "\n".join(faults)


def test_a_cell_without_proof_or_excuse_is_named() -> None:
    gone = next(entry for entry in ENTRIES if entry.stressor)
    task, stressor = gone.task, gone.stressor.split()[0]
    left = [entry for entry in ENTRIES if entry.task != task]
    (cell,) = (
        cell
        for cell in stressor_table(COURSE, left)
        if (cell.task, cell.stressor) == (task, stressor)
    )
    assert (cell.entries, cell.why) == ((), "")
    assert cell.fault.startswith(f"{task} × {stressor}:")


def test_a_cell_with_both_is_named() -> None:
    cell = Cell(task="t.a", stressor="twice", entries=("TA01",), why="No calls.")
    assert cell.fault.startswith("t.a × twice:")
    assert "TA01" in cell.fault


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('tasks = ["no.such"]\nstressors = ["twice"]\nwhy = "."', "'no.such'"),
        (
            'tasks = ["collectives.exchange"]\nstressors = ["heat"]\nwhy = "."',
            "'heat'",
        ),
        ('tasks = []\nstressors = ["twice"]', "tasks, stressors .* why"),
        (
            'tasks = ["collectives.exchange"]\nstressors = ["twice", "twice"]\n'
            'why = "."',
            "collectives.exchange × twice",
        ),
        ("tasks = ", f"{RECORDS}/{NAME}"),
    ],
)
def test_a_wrong_excuse_is_refused(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / RECORDS / NAME
    path.parent.mkdir(parents=True)
    path.write_text(f"[[excused]]\n{row}\n", encoding="utf-8")
    with pytest.raises(CatalogueError, match=said):
        stressor_table(replace(COURSE, root=tmp_path), [])
