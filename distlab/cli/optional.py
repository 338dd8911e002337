"""Decide when and how to mention the optional tasks.

They are off the path: nothing on it waits for one, and the next task is never one while
there is another. A phase's are offered once all its ordinary tasks have passed.
"""

from __future__ import annotations

from collections.abc import Collection

from distlab.cli.screen import command, wrapped
from distlab.curriculum import Curriculum, Task


def offered(curriculum: Curriculum, passed: Collection[str], task: Task) -> list[Task]:
    """Return the phase's open optional tasks once all its ordinary ones have passed."""
    (units,) = (
        {unit.name for unit in phase.units}
        for phase in curriculum.phases
        if task.unit in {unit.name for unit in phase.units}
    )
    left = [t for t in curriculum.tasks if t.unit in units and t.id not in passed]
    return left if all(other.stretch for other in left) else []


def offer(
    curriculum: Curriculum, passed: Collection[str], task: Task
) -> list[tuple[str, str]]:
    """Return two dim lines that offer the optional tasks of the phase.

    They describe the task to take first and list the numbers of the others. Before the
    phase is finished, or if no optional task is left, there are no lines.
    """
    left = offered(curriculum, passed, task)
    if not left:
        return []
    ready = (one for one in left if set(one.needs) <= set(passed))
    first = next(ready, left[0])
    head = f"optional, because nothing else needs it: {first.number} {first.title}, "
    head += f"about {first.minutes} min"
    how = f"      {command(f'watch {first.number}')}"
    if others := ", ".join(other.number for other in left if other is not first):
        how += f"   also {others}"
    return [("dim", line) for line in [*wrapped(head, "  ", "      "), how]]
