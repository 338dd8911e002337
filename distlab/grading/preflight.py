"""What can be said about a task from its file alone, before torch is even imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlab.curriculum import (
    Curriculum,
    SourceError,
    Task,
    UnitSource,
    path_of,
    read_source,
)
from distlab.curriculum.path import is_judged_here
from distlab.curriculum.regions import functions_of
from distlab.grading.static_checks import flaw_in, not_a_def
from distlab.grading.verdict import HALF_DONE, ClauseVerdict, TaskVerdict
from distlab.paths import shown


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A task that can be run; the unit's unfinished tasks are the reference's then."""

    source: UnitSource
    reference: UnitSource
    unfinished: tuple[str, ...]


def look_at(
    curriculum: Curriculum, task: Task, code: str
) -> tuple[TaskVerdict, Ready | None]:
    """The verdict so far, and what to run if there is something to run.

    Without anything to run the verdict is final: not started, renamed, unreadable, not
    Python.
    """
    unit = curriculum.units[task.unit]
    verdict = TaskVerdict(
        id=task.id,
        number=task.number,
        title=task.title,
        status="fail",
        path=shown(path_of(curriculum, unit, code)),
        digest="",
        is_plan=task.kind == "plan",
    )
    try:
        reference = read_source(curriculum, unit, "reference")
        functions = functions_of(reference.text)
        for known in unit.tasks:
            if known.id not in functions:
                raise ValueError(f"it has no region {known.id}")
    except (ValueError, SyntaxError) as error:
        message = f"the reference of {unit.name} is unusable: {error}"
        return replace(verdict, status="error", message=message), None
    try:
        source = read_source(curriculum, unit, code)
        verdict = replace(
            verdict,
            digest=source.digest,
            function_digest=source.function_digest(functions[task.id]),
        )
        states = {t.id: source.state_of(t.id, functions[t.id]) for t in unit.tasks}
    except SourceError as error:
        slug = "syntax-error" if error.is_syntax else ""
        rule = ""
        if code == "mine" and not error.path.exists():
            rule = f"it comes back with: distlab reset {unit.name}"
        verdict = replace(verdict, line=error.line or verdict.line)
        return _all_failed(verdict, task, str(error), slug, rule), None
    state, line = states[task.id]
    verdict = replace(verdict, line=line)
    if state == "not_started":
        message = _what_is_missing(source, task, functions[task.id], verdict)
        verdict = replace(verdict, slug="not-started", message=message)
        return replace(verdict, status="not_started"), None
    if state == "missing":
        why = "it was renamed or removed" if source.text.strip() else "it is empty"
        lost = source.missing(functions[task.id])
        form = not_a_def(source.tree, lost)
        message = form or f"the file has no function {lost}: {why}"
        rule = ""
        if code == "mine":
            rule = f"undo that; or distlab reset {unit.name}, which keeps this file"
        return _all_failed(verdict, task, message, "renamed", rule), None
    flaw = flaw_in(source.tree, reference.tree, functions[task.id])
    if flaw:
        return _all_failed(verdict, task, flaw), None
    unfinished = sorted(name for name, (how, _) in states.items() if how != "started")
    ready = Ready(source=source, reference=reference, unfinished=tuple(unfinished))
    return _if_judged_here(verdict, task, ready)


def _if_judged_here(
    verdict: TaskVerdict, task: Task, ready: Ready
) -> tuple[TaskVerdict, Ready | None]:
    """What `look_at` gives, unless simulated ranks cannot judge the task."""
    if is_judged_here(task):
        return verdict, ready
    message = (
        f"simulated ranks can't judge it: {task.processes} needs real processes. "
        "Use Linux, or try DISTLAB_RANKS=spawned on macOS"
    )
    return replace(verdict, status="not_judged", message=message), None


def graded_files(curriculum: Curriculum, tasks: Sequence[Task], code: str) -> list[str]:
    """A line for each file under judgement, with the digest of what was read."""
    lines = []
    for name in dict.fromkeys(task.unit for task in tasks):
        try:
            source = read_source(curriculum, curriculum.units[name], code)
        except SourceError as error:  # each of its tasks says so, too
            lines.append(f"{shown(error.path)}: {error}")
        else:
            lines.append(f"grading {shown(source.path)}  digest {source.digest}")
    return lines


def _what_is_missing(
    source: UnitSource, task: Task, functions: Sequence[str], verdict: TaskVerdict
) -> str:
    """Which line has nothing yet; with the function's name if others are written."""
    todo = [f for f in functions if source.state_of(task.id, [f])[0] == "not_started"]
    if len(todo) < len(functions):
        return f"{HALF_DONE}: {todo[0]} still raises NotImplementedError"
    return f"{verdict.path}:{verdict.line} still raises NotImplementedError"


def _all_failed(
    verdict: TaskVerdict, task: Task, message: str, slug: str = "", rule: str = ""
) -> TaskVerdict:
    """The same fault in every clause."""
    failed = ClauseVerdict(
        id="", text="", status="fail", message=message, slug=slug, rule=rule
    )
    clauses = tuple(replace(failed, id=i, text=t) for i, t in task.clauses.items())
    return replace(verdict, status="fail", message=message, slug=slug, clauses=clauses)
