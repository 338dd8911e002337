"""What can be said about a task from its file alone, before torch is even imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.curriculum import (
    Curriculum,
    SourceError,
    Task,
    UnitSource,
    path_of,
    read_source,
)
from distlab.curriculum.regions import functions_of
from distlab.grading.static_checks import flaw_in, not_a_def
from distlab.grading.verdict import HALF_DONE, ClauseVerdict, TaskVerdict
from distlab.paths import shown

PRELOADS = {
    "trainer": ("torch._dynamo", "distlab.grading.warmup:one_step"),
    "data_loader": ("numpy.random",),
    "gradient_accumulation": ("torch._dynamo", "distlab.grading.warmup:one_step"),
    "activation_checkpointing": (
        "torch._dynamo",
        "distlab.grading.warmup:one_step",
    ),
    "mixed_precision": ("torch._dynamo", "distlab.grading.warmup:one_step"),
    "model_parallel": ("torch._dynamo", "distlab.grading.warmup:one_step"),
    "pipeline_parallel": (
        "torch._dynamo",
        "torch.distributed.pipelining",
        "distlab.grading.warmup:one_step",
    ),
    "tensor_parallel": (
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "distlab.grading.warmup:one_step",
    ),
    "ring_allreduce": ("torch._dynamo",),
    "distributed_data_parallel": ("distlab.grading.warmup:one_step",),
    "sharded_optimizer": ("torch._dynamo", "distlab.grading.warmup:one_step"),
}
"""What each rank would import by itself: constructing an optimiser needs dynamo, as
does counting operations in virtual time; and a data loader seeds numpy."""


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
        verdict.status = "error"
        verdict.message = f"the reference of {unit.name} is unusable: {error}"
        return verdict, None
    try:
        source = read_source(curriculum, unit, code)
        verdict.digest = source.digest
        verdict.function_digest = source.function_digest(functions[task.id])
        states = {t.id: source.state_of(t.id, functions[t.id]) for t in unit.tasks}
    except SourceError as error:
        slug = "syntax-error" if error.is_syntax else ""
        rule = ""
        if code == "mine" and not error.path.exists():
            rule = f"it comes back with: distlab reset {unit.name}"
        _fail_all(verdict, task, str(error), slug, rule, error.line)
        return verdict, None
    state, verdict.line = states[task.id]
    if state == "not_started":
        verdict.status, verdict.slug = "not_started", "not-started"
        verdict.message = _what_is_missing(source, task, functions[task.id], verdict)
        return verdict, None
    if state == "missing":
        why = "it was renamed or removed" if source.text.strip() else "it is empty"
        lost = source.missing(functions[task.id])
        form = not_a_def(source.tree, lost)
        message = form or f"the file has no function {lost}: {why}"
        rule = ""
        if code == "mine":
            rule = f"undo that; or distlab reset {unit.name}, which keeps this file"
        _fail_all(verdict, task, message, "renamed", rule)
        return verdict, None
    flaw = flaw_in(source.tree, reference.tree, functions[task.id])
    if flaw:
        _fail_all(verdict, task, flaw, "")
        return verdict, None
    unfinished = sorted(name for name, (how, _) in states.items() if how != "started")
    return verdict, Ready(
        source=source, reference=reference, unfinished=tuple(unfinished)
    )


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


def _fail_all(
    verdict: TaskVerdict,
    task: Task,
    message: str,
    slug: str,
    rule: str = "",
    line: int = 0,
) -> None:
    verdict.status, verdict.message, verdict.slug = "fail", message, slug
    verdict.line = line or verdict.line
    verdict.clauses = [
        ClauseVerdict(
            id=name, text=text, status="fail", message=message, slug=slug, rule=rule
        )
        for name, text in task.clauses.items()
    ]
