"""`distlab check`: a verdict now."""

from __future__ import annotations

from collections.abc import Sequence

from distlab.cli.screen import command, show, show_json, warn
from distlab.curriculum import (
    Curriculum,
    Progress,
    ProgressUnavailableError,
    Task,
    load_curriculum,
)
from distlab.grading import Report, TaskVerdict
from distlab.grading.preflight import look_at
from distlab.grading.report import lines_of


def check(
    names: Sequence[str],
    *,
    phase: int | None = None,
    code: str = "mine",
    as_json: bool = False,
    worlds: Sequence[int] = (),
    seed: int | None = None,
) -> int:
    """Judge tasks and return the exit code of the report.

    Raises:
        ValueError: an unknown task or phase, or a number of ranks that cannot be.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    tasks = chosen(curriculum, progress, names, phase)
    check_worlds(worlds)

    def tell(verdict: TaskVerdict) -> None:
        if code == "mine" and verdict.status in ("pass", "fail"):
            remember(progress, verdict)
        if not as_json:
            show(lines_of(verdict))

    if not as_json and code != "mine":
        show([("dim", f"grading {code}")])
    report = judge(curriculum, tasks, code=code, worlds=worlds, seed=seed, tell=tell)
    if as_json:
        show_json(report.to_json())
    elif code == "mine":
        show(_what_next(curriculum, progress, report))
    return report.exit_code


def judge(
    curriculum: Curriculum,
    tasks: Sequence[Task],
    *,
    code: str,
    worlds: Sequence[int] = (),
    seed: int | None = None,
    tell: object = None,
) -> Report:
    """Judge `tasks`; torch and ranks are started only if something can be run."""
    on_verdict = tell if callable(tell) else None
    looked = [look_at(curriculum, task, code) for task in tasks]
    if all(ready is None for _, ready in looked):
        verdicts = [verdict for verdict, _ in looked]
        for verdict in verdicts:
            if on_verdict:
                on_verdict(verdict)
        return Report(code=code, seed=0, tasks=verdicts)
    from distlab.runner import Cluster

    with Cluster() as cluster:
        cluster.start(wait=False)  # it imports torch while we do
        from distlab.grading.grade import Grader

        grader = Grader(curriculum, cluster, code=code, seed=seed, worlds=worlds)
        return grader.grade(tasks, on_verdict)


def check_worlds(worlds: Sequence[int]) -> Sequence[int]:
    """The numbers of ranks that were asked for, if they can be had.

    Raises:
        ValueError: one of them cannot.
    """
    for world_size in worlds:
        if not 1 <= world_size <= 64:
            raise ValueError(f"{world_size} ranks: choose between 1 and 64")
    return worlds


def chosen(
    curriculum: Curriculum,
    progress: Progress,
    names: Sequence[str],
    phase: int | None = None,
) -> list[Task]:
    """The tasks that were asked for; without any, the current one.

    Raises:
        CurriculumError: an unknown name.
    """
    if phase is not None:
        units = {unit.name for unit in curriculum.phase(phase).units}
        return [task for task in curriculum.tasks if task.unit in units]
    if names:
        return [curriculum.task(name) for name in names]
    return [current_task(curriculum, progress)]


def current_task(curriculum: Curriculum, progress: Progress) -> Task:
    """The first task on the path that has not passed; the last one when all have."""
    passed = progress.passed()
    for task in curriculum.tasks:
        if task.id not in passed:
            return task
    return curriculum.tasks[-1]


def remember(progress: Progress, verdict: TaskVerdict) -> None:
    """Note the verdict in the progress file, or say once that it cannot be kept."""
    try:
        progress.record_verdict(
            verdict.id, passed=verdict.status == "pass", digest=verdict.digest
        )
    except ProgressUnavailableError as error:
        warn(str(error))


def what_helps(curriculum: Curriculum, verdict: TaskVerdict) -> list[tuple[str, str]]:
    """One dim line on what to type after a verdict."""
    if verdict.status == "pass":
        return next_task(curriculum, verdict.id)
    if verdict.status == "fail":
        helps = command(f"hint {verdict.number}")
        if verdict.slug:
            helps += f"   {command(f'explain {verdict.slug}')}"
        return [("dim", f"  {helps}")]
    return []


def next_task(curriculum: Curriculum, task_id: str) -> list[tuple[str, str]]:
    """Where to go after a task has passed."""
    ids = [task.id for task in curriculum.tasks]
    done = curriculum.tasks[ids.index(task_id)]
    lines = []
    if done.milestone:
        lines.append(("pass", f"  ◆ {done.milestone}"))
    if task_id == ids[-1]:
        return [*lines, ("dim", "  that was the last task there is so far")]
    task = curriculum.tasks[ids.index(task_id) + 1]
    verdict, _ = look_at(curriculum, task, "mine")
    lines.append(
        ("dim", f"  next: {task.number} {task.title}, about {task.minutes} min")
    )
    lines.append(("dim", f"        {verdict.path}:{verdict.line}"))
    return lines


def _what_next(
    curriculum: Curriculum, progress: Progress, report: Report
) -> list[tuple[str, str]]:
    if len(report.tasks) == 1:
        return what_helps(curriculum, report.tasks[0])
    counts = {"pass": 0, "fail": 0, "not_started": 0, "error": 0}
    for verdict in report.tasks:
        counts[verdict.status] += 1
    text = f"{counts['pass']} passed, {counts['fail']} not yet, "
    text += f"{counts['not_started']} not started"
    return [("plain", text)]
