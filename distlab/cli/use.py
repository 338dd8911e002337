"""`distlab use`: whose part stands for a unit or a task where several work together."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distlab.cli.screen import show, warn
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.choose import (
    OVERRIDE,
    as_side,
    chosen_unit,
    names_to_set,
    settings_for,
)


def use(side: str = "", names: Sequence[str] = ()) -> int:
    """Set the side of units and tasks, and print the table of what is used.

    Raises:
        CurriculumError: no such side, unit or task.
        SourceError: the learner's file is demanded and is no Python.
        ProgressUnavailableError: the choice cannot be kept.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    if side:
        wanted = as_side(side)
        ids = names_to_set(curriculum, list(names))
        kept = progress.read().get("use", {})
        progress.keep("use", settings_for(curriculum, kept, ids, wanted))
    if os.environ.get(OVERRIDE):
        warn(f"{OVERRIDE}={os.environ[OVERRIDE]} is set and counts for everything")
    order = [task.id for task in curriculum.tasks]
    choices = [chosen_unit(curriculum, unit) for unit in curriculum.units]
    parts = [part for choice in choices for part in choice.parts]
    parts.sort(key=lambda part: order.index(part.task))
    show([("plain", part.line()) for part in parts])
    return 0
