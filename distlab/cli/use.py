"""`distlab use`: choose whose code runs where several units work together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from distlab.cli.screen import command, show, warn
from distlab.curriculum import Curriculum, Progress, SourceError, load_curriculum
from distlab.curriculum.choose import (
    OVERRIDE,
    Part,
    as_side,
    chosen_unit,
    names_to_set,
    settings_for,
)


def use(side: str = "", names: Sequence[str] = ()) -> int:
    """Set the side of units and tasks and print changes, or print the whole table.

    Raises:
        CurriculumError: no such side, unit or task.
        SourceError: the learner's file is needed, but it isn't valid Python.
        ProgressUnavailableError: we can't save the choice.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    if os.environ.get(OVERRIDE):
        warn(
            f"{OVERRIDE}={os.environ[OVERRIDE]} is set, which overrides these settings"
        )
    if not side:
        show([("plain", part.line()) for part in _parts(curriculum)])
        return 0
    wanted = as_side(side)
    ids = names_to_set(curriculum, list(names))
    before: dict[str, Part] = {}
    with contextlib.suppress(SourceError):  # what is set now may be the way out of it
        before = {part.task: part for part in _parts(curriculum)}
    kept = progress.read().get("use", {})
    progress.keep("use", settings_for(curriculum, kept, ids, wanted))
    after = _parts(curriculum)
    changed = [part for part in after if part != before.get(part.task)]
    show([("plain", part.line()) for part in changed])
    same = len(after) - len(changed)
    tasks = f"{same} task{'s' * (same != 1)}"
    count = f"{tasks} as before"
    if not changed:
        named = [
            part for part in after if {part.task, part.task.split(".")[0]} & {*ids}
        ]
        unwritten = wanted == "mine" and any(
            part.why == "not started" for part in named
        )
        until = " until you write one of these tasks" if unwritten else ""
        count = f"nothing changes{until}: {count}"
    show([("dim", f"{count}; {command('use')} shows them all")])
    return 0


def _parts(curriculum: Curriculum) -> list[Part]:
    """List whose code each task runs, in the order of the path."""
    order = [task.id for task in curriculum.tasks]
    choices = [chosen_unit(curriculum, unit) for unit in curriculum.units]
    parts = [part for choice in choices for part in choice.parts]
    return sorted(parts, key=lambda part: order.index(part.task))
