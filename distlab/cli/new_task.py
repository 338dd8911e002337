"""`distlab new-task`: write a new task's stubs, and list what is left to do."""

from __future__ import annotations

from distlab.cli.screen import show
from distlab.cli.templates import templates
from distlab.curriculum import load_curriculum
from distlab.paths import shown

REMINDERS = """\
Also reread these texts, because no program can know what they should say:
  the unit's guide page: its objectives, and the units that the task needs
  the phase's guidelines.md: the row of the unit, and the counterpart in torch
  README.md: the hours
  the phase's answers.toml: perhaps a new question for `distlab quiz`
Then run `make test`, and regenerate the golden files that count tasks."""


def new_task(number: str, task_id: str) -> int:
    """Write a task's stubs unless they exist, then list what is left; return 0.

    Raises:
        CurriculumError: the number or the id can't be used.
        CatalogueError: the catalogue can't be read.
    """
    from distlab.grading.new_task import create, left_to_do

    curriculum = load_curriculum()
    if (number, task_id) not in {(task.number, task.id) for task in curriculum.tasks}:
        files = create(curriculum, number, task_id)
        show([("plain", f"wrote or changed {shown(path)}") for path in files])
        templates()
        curriculum = load_curriculum()
    left = left_to_do(curriculum, curriculum.task(task_id))
    show([("plain", ""), ("plain", f"left to do for {number} {task_id}:")])
    show([("plain", f"  {sentence}") for sentence in left])
    show([("plain", line) for line in ["", *REMINDERS.splitlines()]])
    return 0
