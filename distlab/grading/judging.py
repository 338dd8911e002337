"""Judge tasks now, with as little started as they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlab.curriculum import Curriculum, Task
from distlab.grading.preflight import look_at
from distlab.grading.verdict import Report, TaskVerdict


def judge(
    curriculum: Curriculum,
    tasks: Sequence[Task],
    *,
    code: str,
    worlds: Sequence[int] = (),
    seed: int | None = None,
    tell: Callable[[TaskVerdict], None] = lambda _: None,
    sign: Callable[[str], None] = lambda _: None,
) -> Report:
    """Judge `tasks`; torch and ranks are started only if something can be run.

    `tell` hears each verdict; `sign` hears what is being judged, and an empty text once
    a task is.
    """
    looked = [look_at(curriculum, task, code) for task in tasks]
    if all(ready is None for _, ready in looked):
        verdicts = [verdict for verdict, _ in looked]
        for verdict in verdicts:
            tell(verdict)
        return Report(code=code, seed=0, tasks=verdicts)
    sign(f"checking {tasks[0].number}")  # torch alone takes a second
    from distlab.ranks import new_cluster

    units = {task.unit for task in tasks}
    preload = [n for unit in sorted(units) for n in curriculum.units[unit].preload]
    with new_cluster() as cluster:
        cluster.warm(*preload)
        cluster.start(wait=False)  # it imports all that while we import torch
        from distlab.grading.grade import Grader

        left = [task.number for task in tasks]

        def told(verdict: TaskVerdict) -> None:
            sign("")
            left.remove(verdict.number)
            tell(verdict)
            sign(f"checking {left[0]}" if left else "")

        grader = Grader(
            curriculum,
            cluster,
            code=code,
            seed=seed,
            worlds=worlds,
            on_step=lambda step: sign(f"checking {left[0]}: {step}"),
        )
        return grader.grade(tasks, told)
