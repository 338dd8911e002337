"""Guide a learner through their tasks: next, check, hint, why it hung, solution."""

from __future__ import annotations

from typing import Any

from distlab.curriculum import (
    Curriculum,
    Progress,
    ProgressUnavailableError,
    Task,
    load_curriculum,
    read_source,
)
from distlab.curriculum.functions import find_function, span_of, without_markers
from distlab.curriculum.hints import LEVELS, read_hints
from distlab.curriculum.misconceptions import fitting_hint, read_misconceptions
from distlab.curriculum.path import current_task, passed_tasks, remaining
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import UnitSource
from distlab.grading.preflight import look_at
from distlab.tutor.answers import answer
from distlab.tutor.pages import mistake_page, plain


class NotSolvedYetError(ValueError):
    """You asked for a solution before the learner's own code has passed."""


def next_task() -> dict[str, Any]:
    """Return the current task: what to build, where, and how long it takes."""
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    task = current_task(curriculum, progress)
    passed = passed_tasks(curriculum, progress)
    core = [other for other in curriculum.tasks if not other.stretch]
    return {
        **_about(curriculum, task),
        "passed": sum(other.id in passed for other in core),
        "of": len(core),
        "minutes_left": sum(t.minutes for t in remaining(curriculum, passed)),
    }


def check(task: str = "") -> dict[str, Any]:
    """Judge the learner's code for a task, or for the current one.

    Returns the status ("pass", "fail", "not_started" or "error"), the verdict as the
    terminal shows it, and the name of the misconception if we recognize one.

    Raises:
        ValueError: no task has this name.
    """
    from distlab.grading.judging import judge
    from distlab.grading.remember import record
    from distlab.grading.report import lines_of
    from distlab.tutor.last_run import keep_timeline

    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    chosen = _chosen(curriculum, progress, task)
    drawn: list[tuple[str, str]] = []
    unkept: list[str] = []

    def tell(verdict: Any) -> None:
        try:
            record(progress, verdict)
        except ProgressUnavailableError as error:
            unkept.append(str(error))
        drawn.extend(keep_timeline(progress, verdict, unkept.append))

    report = judge(curriculum, [chosen], code="mine", tell=tell)
    (verdict,) = report.tasks
    return {
        **_about(curriculum, chosen),
        "status": verdict.status,
        "verdict": plain([*lines_of(verdict), *drawn]),
        "misconception": verdict.slug,
        "warnings": unkept,
    }


def hint(task: str = "") -> dict[str, Any]:
    """Give one hint for a task, one level deeper each time: question, principle, steps.

    Raises:
        ValueError: no task has this name, or the task has no hints.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    chosen = _chosen(curriculum, progress, task)
    levels = read_hints(curriculum, chosen)
    if not levels:
        raise ValueError(f"there are no hints for {chosen.id}")
    try:
        level, slug = progress.next_hint(chosen.id, len(LEVELS), fitting_hint)
    except ProgressUnavailableError:
        level, slug = 1, ""
    return {
        **_about(curriculum, chosen),
        "level": level,
        "of": len(LEVELS),
        "kind": LEVELS[level - 1],
        "because_of": slug,
        "text": levels[level],
    }


def why_did_it_hang(error: str = "") -> dict[str, Any]:
    """Explain the hang of the last check, or an error of torch that you paste.

    Raises:
        ValueError: the pasted text contains no error that we can explain.
    """
    curriculum = load_curriculum()
    if error.strip():
        return {"found": True, "text": plain(answer(error, curriculum))}
    from distlab.tutor.last_run import timeline_path, verdict_path

    progress = Progress(curriculum.root)
    last = progress.read().get("last", {})
    if not last or last.get("passed"):
        text = "the last check did not fail; run a check that hangs first"
        return {"found": False, "text": text}
    slug = str(last.get("slug", ""))
    verdict = _text_of(verdict_path(progress))
    told = {
        "found": bool(verdict),
        "task": str(last.get("task", "")),
        "verdict": verdict,
        "picture": _text_of(timeline_path(progress).with_suffix(".txt")),
        "misconception": slug,
    }
    known = read_misconceptions()
    told["text"] = plain(mistake_page(slug, known[slug])) if slug in known else ""
    return told


def solution(task: str) -> dict[str, Any]:
    """Return the reference's code for a task that the learner has already solved.

    Raises:
        NotSolvedYetError: the task has not passed, so we do not even read its solution.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    chosen = curriculum.task(task)
    entry = progress.read().get("tasks", {}).get(chosen.id, {})
    # Refuse a task that never passed before opening any file in solutions/.
    if not entry.get("passed") or chosen.id not in passed_tasks(curriculum, progress):
        raise NotSolvedYetError(
            f"{chosen.number} has not passed, so its solution is not shown; ask for a "
            "hint, a check, or an explanation"
        )
    unit = curriculum.units[chosen.unit]
    reference = read_source(curriculum, unit, "reference")
    names = functions_of(reference.text)[chosen.id]
    clean = UnitSource(
        unit.name, "reference", reference.path, without_markers(reference.text)
    )
    nodes = (find_function(clean.tree, name) for name in names)
    lines = clean.text.splitlines()
    parts = [lines[slice(span_of(n)[0] - 1, span_of(n)[1])] for n in nodes if n]
    code = "\n\n".join("\n".join(part) for part in parts)
    return {**_about(curriculum, chosen), "code": code}


def _chosen(curriculum: Curriculum, progress: Progress, name: str) -> Task:
    return curriculum.task(name) if name else current_task(curriculum, progress)


def _about(curriculum: Curriculum, task: Task) -> dict[str, Any]:
    unit = curriculum.units[task.unit]
    verdict, _ = look_at(curriculum, task, "mine")
    guide = unit.guide(curriculum.root).relative_to(curriculum.root)
    return {
        "number": task.number,
        "id": task.id,
        "title": task.title,
        "minutes": task.minutes,
        "place": verdict.place,
        "guide": guide.as_posix(),
        "clauses": task.clauses,
    }


def _text_of(path: Any) -> str:
    try:
        return str(path.read_text(encoding="utf-8"))
    except OSError:
        return ""
