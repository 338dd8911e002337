"""What can be said about a task from its file alone, before torch is even imported."""

from __future__ import annotations

from dataclasses import dataclass

from distlab.curriculum import Curriculum, SourceError, Task, UnitSource, read_source
from distlab.curriculum.regions import functions_of
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
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
        path=shown(unit.template(curriculum.root)),
        digest="",
    )
    try:
        reference = read_source(curriculum, unit, "reference")
        functions = functions_of(reference.text)
    except (SourceError, ValueError) as error:
        verdict.status = "error"
        verdict.message = f"the reference of {unit.name} is unusable: {error}"
        return verdict, None
    try:
        source = read_source(curriculum, unit, code)
        verdict.path, verdict.digest = shown(source.path), source.digest
        states = {t.id: source.state_of(t.id, functions[t.id]) for t in unit.tasks}
    except SourceError as error:
        _fail_all(verdict, task, *_broken(error))
        return verdict, None
    state, verdict.line = states[task.id]
    if state == "not_started":
        verdict.status, verdict.slug = "not_started", "not-started"
        verdict.message = (
            f"{verdict.path}:{verdict.line} still raises NotImplementedError"
        )
        return verdict, None
    if state == "missing":
        message = (
            f"{verdict.path} has no function {functions[task.id]}: "
            "it was renamed or removed"
        )
        _fail_all(verdict, task, message, "renamed")
        return verdict, None
    unfinished = sorted(name for name, (how, _) in states.items() if how != "started")
    return verdict, Ready(
        source=source, reference=reference, unfinished=tuple(unfinished)
    )


def _broken(error: SourceError) -> tuple[str, str, int]:
    if error.line:
        return f"{shown(error.path)}: {error}", "syntax-error", error.line
    return str(error), "", 0


def _fail_all(
    verdict: TaskVerdict, task: Task, message: str, slug: str, line: int = 0
) -> None:
    verdict.status, verdict.message, verdict.slug = "fail", message, slug
    verdict.line = line or verdict.line
    verdict.clauses = [
        ClauseVerdict(id=name, text=text, status="fail", message=message, slug=slug)
        for name, text in task.clauses.items()
    ]
