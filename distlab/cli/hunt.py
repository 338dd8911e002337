"""`distlab hunt`: find the wrong line in a finished solution.

The mistakes are those of the catalogue the grader is tested with. What is wrong is not
told before the line is found, only what the grader saw. Tasks that have not passed stay
holes in the file that is written: a hunt gives nothing else away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from distlab.cli.hunt_text import guilty_lines, hunted_text
from distlab.cli.prompt import QuitError, ask_line
from distlab.cli.screen import command, cut, show, waiting, warn, wrapped
from distlab.curriculum import (
    Curriculum,
    CurriculumError,
    Progress,
    Task,
    load_curriculum,
)
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.path import passed_tasks
from distlab.grading import FAILED, TaskVerdict
from distlab.grading.catalogue import Entry, read_catalogue
from distlab.grading.verdict import ClauseVerdict
from distlab.paths import shown
from distlab.tutor.last_run import keep_timeline

_TRIES = 3  # on a terminal, before the answer may be asked for


@dataclass(frozen=True, kw_only=True)
class Target:
    """A broken unit: its path, and which of its lines count as the mistake."""

    entry: Entry
    milestone: Task
    path: Path
    text: str
    guilty: frozenset[int]


def hunt(
    milestone: str = "",
    *,
    line: int | None = None,
    anyway: bool = False,
    new: bool = False,
    seed: int = 0,
) -> int:
    """Show a broken unit, or judge the named line; return 0 if it's the right one.

    Raises:
        CurriculumError: no such milestone, none that has passed, or nothing to hunt.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    entries = _entries(curriculum)
    if line is not None:
        task, entry = _open_hunt(
            curriculum, progress, entries, milestone, anyway=anyway
        )
        target = _prepare(curriculum, progress, task, entry, entries)
        return _judge(progress, target, line)
    task = _milestone(curriculum, progress, entries, milestone, anyway=anyway)
    entry = _entry_to_hunt(curriculum, progress, task, entries, new=new, seed=seed)
    target = _prepare(curriculum, progress, task, entry, entries)
    _tell(curriculum, progress, target)
    return _ask(progress, target)


# ── which one ───────────────────────────────────────────────────────────────────────


def _entries(curriculum: Curriculum) -> list[Entry]:
    found = read_catalogue(curriculum, hunts_only=True)
    if not found:
        raise CurriculumError("this copy of the course has nothing to hunt")
    return found


def _milestone(
    curriculum: Curriculum,
    progress: Progress,
    entries: list[Entry],
    name: str,
    *,
    anyway: bool,
) -> Task:
    """Return the named milestone, or else the last one that has passed."""
    numbers = {entry.hunt for entry in entries}
    known = [task for task in curriculum.tasks if task.number in numbers]
    passed = passed_tasks(curriculum, progress)
    if name:
        task = curriculum.task(name)
        if task not in known:
            places = ", ".join(task.number for task in known)
            raise CurriculumError(
                f"there is no hunt at {task.number}; choose one of {places}"
            )
        if task.id in passed or anyway:
            return task
        raise CurriculumError(
            f"the hunt at {task.number} opens once {task.number} has passed; to start "
            f"it anyway: {command(f'hunt {task.number} --anyway')}"
        )
    open_ = known if anyway else [task for task in known if task.id in passed]
    if not open_:
        raise CurriculumError(
            f"the first hunt opens once {known[0].number} has passed; to start it "
            f"anyway: {command('hunt --anyway')}"
        )
    return open_[-1]


def _open_hunt(
    curriculum: Curriculum,
    progress: Progress,
    entries: list[Entry],
    name: str,
    *,
    anyway: bool,
) -> tuple[Task, Entry]:
    """Return the hunt that a line answers, without starting another one."""
    asked = curriculum.task(name).number if name else ""
    by_id = {entry.id: entry for entry in entries}
    for task in reversed(curriculum.tasks):
        current = _kept(progress, task).current
        if asked in ("", task.number) and current in by_id:
            return task, by_id[current]
    try:  # what is advised here must not be refused there
        _milestone(curriculum, progress, entries, name, anyway=anyway)
    except CurriculumError as error:
        raise CurriculumError(f"we can't judge a line: {error}") from None
    at = f" at {asked}" if asked else ""
    begin = " ".join(("hunt", *([asked] if asked else []), *["--anyway"] * anyway))
    raise CurriculumError(
        f"no hunt is open{at}, so there is no line to judge; start one with: "
        f"{command(begin)}"
    )


def _entry_to_hunt(
    curriculum: Curriculum,
    progress: Progress,
    task: Task,
    entries: list[Entry],
    *,
    new: bool,
    seed: int,
) -> Entry:
    """Return the open hunt, or else draw one that wasn't found yet."""
    here = sorted((e for e in entries if e.hunt == task.number), key=lambda e: e.id)
    kept = _kept(progress, task)
    current, found = kept.current, kept.found
    for entry in here:
        if entry.id == current and not new:
            return entry
    left = [e for e in here if e.id not in found and e.id != current]
    left = left or [e for e in here if e.id != current] or here
    entry = random.Random(f"{seed} {task.number} {len(found)}").choice(left)
    filled = passed_tasks(curriculum, progress) | {entry.task}
    _keep(progress, task, Kept(current=entry.id, found=found, filled=[*filled]))
    return entry


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The record of a milestone: its open hunt and the finished ones.

    `filled` lists the tasks that the open hunt's file shows, because the line numbers
    in that file must not change.
    """

    current: str
    found: list[str]
    filled: list[str]


def _kept(progress: Progress, task: Task) -> Kept:
    kept = progress.read().get("hunts", {}).get(task.number)
    kept = kept if isinstance(kept, dict) else {}
    return Kept(
        current=str(kept.get("open", "")),
        found=_names(kept.get("found")),
        filled=_names(kept.get("filled")),
    )


def _names(value: object) -> list[str]:
    names = value if isinstance(value, list) else []
    return [name for name in names if isinstance(name, str)]


def _keep(progress: Progress, task: Task, kept: Kept) -> None:
    table = {
        "open": kept.current,
        "found": sorted({*kept.found}),
        "filled": sorted({*kept.filled}),
    }
    try:
        progress.keep("hunts", {task.number: table})
    except OSError as error:
        warn(str(error))


def _prepare(
    curriculum: Curriculum,
    progress: Progress,
    task: Task,
    entry: Entry,
    entries: list[Entry],
) -> Target:
    """Write the broken unit to a file, and find out which lines are wrong.

    Raises:
        CurriculumError: we can't write the file.
    """
    unit = curriculum.units[entry.unit]
    solution = unit.solution(curriculum.root).read_text(encoding="utf-8")
    filled = {entry.task, *_kept(progress, task).filled}
    broken = hunted_text(entry.applied_to(solution), filled)
    right = right_text(solution, entry, entries)
    path = progress.folder / "hunt" / f"{unit.name}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(broken, encoding="utf-8")
    except OSError as error:
        raise CurriculumError(f"cannot write {path}: {error.strerror}") from error
    return Target(
        entry=entry,
        milestone=task,
        path=path,
        text=broken,
        guilty=guilty_lines(hunted_text(right, filled), broken),
    )


def right_text(solution: str, entry: Entry, entries: list[Entry]) -> str:
    """Return what we broke: the solution, or another right variant."""
    twin = next((other for other in entries if other.id == entry.twin), None)
    return twin.applied_to(solution) if twin else solution


# ── asking and answering ────────────────────────────────────────────────────────────


def _tell(curriculum: Curriculum, progress: Progress, target: Target) -> None:
    lines = [
        ("plain", f"Hunt at {target.milestone.number}: there is one mistake in"),
        ("plain", f"  {shown(target.path)}"),
        ("plain", f"This is what the grader saw{_part_of(curriculum, target)}:"),
        ("plain", ""),
    ]
    show([*lines, *_symptoms(curriculum, progress, target), ("plain", "")])


def _part_of(curriculum: Curriculum, target: Target) -> str:
    """Say which task the grader looked at, if it wasn't the milestone itself."""
    task = curriculum.task(target.entry.task)
    if task.number == target.milestone.number:
        return ""
    return f" at {task.number}, a task on the way to {target.milestone.number}"


def _symptoms(
    curriculum: Curriculum, progress: Progress, target: Target
) -> list[tuple[str, str]]:
    """Return the verdict on the broken unit without the mistake's name or rule.

    Its last line says where the run's timeline is, if ranks have run.
    """
    from distlab.grading.grade import Grader
    from distlab.grading.report import lines_of
    from distlab.ranks import new_cluster

    task = curriculum.task(target.entry.task)
    sign = waiting(f"checking {task.number} in the broken file")
    with sign, new_cluster() as cluster:
        grader = Grader(curriculum, cluster, code=str(target.path), seed=1)
        verdict = grader.grade([task]).tasks[0]
        told = bare(verdict)
        page = target.path.with_name("trace.html")
        drawn = keep_timeline(progress, told, warn, at=page)
    return [*lines_of(told), *drawn]


def bare(verdict: TaskVerdict) -> TaskVerdict:
    """Return what the grader saw, but no diagnosis, which would give it away."""
    clauses = (_bare(clause, verdict.is_plan) for clause in verdict.clauses)
    return replace(verdict, slug="", clauses=tuple(clauses))


def _bare(clause: ClauseVerdict, is_plan: bool) -> ClauseVerdict:
    message = clause.message
    if clause.run is None or clause.run.outcome == "finished":
        size = clause.world_size
        is_said = size and (size > 1 or not is_plan)  # a plan has one process
        ranks = f" on {size} rank{'s' * (size != 1)}" if is_said else ""
        message = f"this doesn't hold{ranks}: {clause.text}{_spread_of(clause)}"
    return replace(clause, slug="", rule="", message=message)


def _spread_of(clause: ClauseVerdict) -> str:
    """Say in words if the ranks are wrong in the same way."""
    wrong = [row for row in clause.evidence if row.state == "wrong"]
    got = {row.text.partition("expected")[0] for row in wrong}
    if len(wrong) < 2:
        return ""
    if len(got) == 1:
        return f"; {len(wrong)} ranks have the same wrong numbers"
    return f"; {len(wrong)} ranks have {len(got)} different results"


def _ask(progress: Progress, target: Target) -> int:
    for _ in range(_TRIES):
        try:
            answer = ask_line("Which line is wrong? (its number, or q) > ")
        except QuitError:
            break
        if not answer.isdecimal():
            show([("plain", "Type a line number, such as 31, or q to stop for now.")])
            continue
        if _judge(progress, target, int(answer)) == 0:
            return 0
    again = command(f"hunt {target.milestone.number} --line N")
    show([("dim", f"the file stays where it is; to continue later: {again}")])
    return FAILED


def _judge(progress: Progress, target: Target, line: int) -> int:
    lines = target.text.splitlines()
    if not 1 <= line <= len(lines):
        raise CurriculumError(
            f"{shown(target.path)} has {len(lines)} lines, so choose a number from 1 "
            f"to {len(lines)}"
        )
    if line not in target.guilty:
        here = lines[line - 1].strip() or "(empty)"
        show([("fail", cut(f"line {line} is correct: {here}"))])
        return FAILED
    over = [*_kept(progress, target.milestone).found, target.entry.id]
    _keep(progress, target.milestone, Kept(current="", found=over, filled=[]))
    found = wrapped(f"Found: line {line}. {target.entry.title}")
    show([("pass", row) for row in found])
    show([("plain", f"  {n:>4}  {lines[n - 1]}") for n in sorted(target.guilty)])
    entry = read_misconceptions().get(target.entry.slug)
    if entry:
        show([("plain", ""), ("rule", entry["title"])])
        text = entry["why"].strip().splitlines() + entry["fix"].strip().splitlines()
        show([("plain", f"  {row}") for row in text])
    return 0
