"""`distlab check`: judge tasks now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distlab.cli.optional import offer
from distlab.cli.own_course import own_course
from distlab.cli.screen import command, show, show_json, waiting, warn, wrapped
from distlab.cli.trace import keep_timeline
from distlab.curriculum import (
    Curriculum,
    Progress,
    ProgressUnavailableError,
    SourceError,
    Task,
    load_curriculum,
    path,
)
from distlab.curriculum.path import current_task, passed_tasks
from distlab.curriculum.units import units_in
from distlab.grading import Report, TaskVerdict
from distlab.grading.judging import judge
from distlab.grading.preflight import graded_files, look_at
from distlab.grading.remember import record
from distlab.grading.report import lines_of
from distlab.paths import shown
from distlab.runner.limits import MAX_RANKS
from distlab.terminal import screen_width


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
        ValueError: an unknown task or phase, an invalid number of ranks, or no
            such file.
    """
    curriculum = own_course() if code == "mine" else load_curriculum()
    progress = Progress(curriculum.root)
    check_worlds(worlds)
    check_code(code)
    tasks = chosen(curriculum, progress, names, phase)
    # A file has one unit: only tasks that were named must be in it.
    if code not in ("mine", "reference") and all(name.isdecimal() for name in names):
        are_asked = bool(names) or phase is not None
        tasks = _in_file(curriculum, tasks, code, are_asked=are_asked)

    def tell(verdict: TaskVerdict) -> None:
        if code == "mine":
            remember(progress, verdict, worlds)
        if not as_json:
            show(lines_of(verdict))
        if code == "mine":
            drawn = keep_timeline(progress, verdict)
            show([] if as_json else drawn)

    if not as_json and (len(tasks) > 1 or code != "mine"):
        show([("dim", line) for line in graded_files(curriculum, tasks, code)])
    with waiting(quiet=as_json) as sign:
        report = judge(
            curriculum,
            tasks,
            code=code,
            worlds=worlds,
            seed=seed,
            tell=tell,
            sign=sign,
        )
    if as_json:
        show_json(report.to_json())
    elif code == "mine":
        show(_what_next(curriculum, progress, report, worlds))
    return report.exit_code


def check_worlds(worlds: Sequence[int]) -> Sequence[int]:
    """Return the requested numbers of ranks if they are valid.

    Raises:
        ValueError: one of them isn't.
    """
    for world_size in worlds:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"{world_size} ranks: choose between 1 and {MAX_RANKS}")
    return worlds


def check_code(code: str) -> None:
    """Require that we know whose code to judge.

    Raises:
        ValueError: it is neither mine nor reference nor a file.
    """
    if code not in ("mine", "reference") and not Path(code).is_file():
        raise ValueError(f"--code {code!r}: choose mine, reference or a file")


def chosen(
    curriculum: Curriculum,
    progress: Progress,
    names: Sequence[str],
    phase: int | None = None,
) -> list[Task]:
    """Return the requested tasks, or else the current one.

    Raises:
        ValueError: an unknown name, or names as well as a phase.
    """
    if names and phase is not None:
        raise ValueError("name either a phase or tasks, but not both")
    if phase is not None:
        return curriculum.tasks_of(phase)
    if names:
        return [task for name in names for task in _named(curriculum, name)]
    return [current_task(curriculum, progress)]


def _named(curriculum: Curriculum, name: str) -> list[Task]:
    """Read a bare number as a phase, and anything else as a task."""
    if name.isdecimal():
        return curriculum.tasks_of(int(name))
    return [curriculum.task(name)]


def _in_file(
    curriculum: Curriculum, tasks: list[Task], code: str, *, are_asked: bool
) -> list[Task]:
    """Return the tasks that are in the file's unit, or all of its tasks by default.

    If the file isn't valid Python, return `tasks`, whose verdict then says so.

    Raises:
        ValueError: it has no function of any of them.
    """
    try:
        units = units_in(curriculum, code)
    except SourceError:
        return tasks
    own = [task for task in tasks if task.unit in units]
    others = [task for task in curriculum.tasks if task.unit in units]
    if own or (others and not are_asked):
        return own or others
    named, known = shown(Path(code)), ", ".join(units)
    if not others:
        raise ValueError(
            f"{named} doesn't define any function that a task of the course asks for"
        )
    raise ValueError(
        f"{named} doesn't define any function of these tasks, only functions of {known}"
    )


def remember(
    progress: Progress, verdict: TaskVerdict, worlds: Sequence[int] = ()
) -> None:
    """Record the verdict in the progress file, or say once that we can't."""
    try:
        record(progress, verdict, worlds)
    except ProgressUnavailableError as error:
        warn(str(error))


def what_helps(
    curriculum: Curriculum,
    progress: Progress,
    verdict: TaskVerdict,
    worlds: Sequence[int] = (),
) -> list[tuple[str, str]]:
    """Return a dim line or two on what to type after a verdict."""
    if verdict.status == "pass" and worlds:
        counts = command(f"check {verdict.number}")
        return [
            (
                "dim",
                f"  to count, it has to pass with all numbers of ranks: {counts}",
            )
        ]
    if verdict.status == "pass":
        return next_task(curriculum, progress, verdict.id)
    if verdict.status == "fail":
        helps = [command(f"hint {verdict.number}")]
        if verdict.slug:
            helps.append(command(f"explain {verdict.slug}"))
        side_by_side = "   ".join(helps)
        if len(side_by_side) + 2 <= screen_width():
            helps = [side_by_side]
        return [("dim", f"  {line}") for line in helps]
    return []


def next_task(
    curriculum: Curriculum, progress: Progress, task_id: str
) -> list[tuple[str, str]]:
    """Suggest where to go after a pass: the next task, and optional ones."""
    lines = []
    done = curriculum.task(task_id)
    if done.milestone:
        milestone = wrapped(f"◆ {done.milestone}", "  ")
        lines += [("pass", line) for line in milestone]
    passed = {*passed_tasks(curriculum, progress), task_id}
    task = path.next_task(curriculum, progress, {task_id})
    if task is None:
        return [*lines, ("dim", "  you have passed all the tasks")]
    verdict, _ = look_at(curriculum, task, "mine")
    word = "next, optional" if task.stretch else "next"
    head = f"{word}: {task.number} {task.title}, about {task.minutes} min"
    lines += [("dim", line) for line in wrapped(head, "  ", "      ")]
    lines.append(("dim", f"        {verdict.place}"))
    return [*lines, *([] if task.stretch else offer(curriculum, passed, done))]


def _what_next(
    curriculum: Curriculum,
    progress: Progress,
    report: Report,
    worlds: Sequence[int],
) -> list[tuple[str, str]]:
    if len(report.tasks) == 1:
        return what_helps(curriculum, progress, report.tasks[0], worlds)
    counts = Counter(verdict.status for verdict in report.tasks)
    text = f"{counts['pass']} passed, {counts['fail']} not yet, "
    text += f"{counts['not_started']} not started"
    if counts["not_judged"]:
        text += f", {counts['not_judged']} not judged on this system"
    return [("plain", text)]
