"""`distlab blind`: judge solutions that were written without a look at the checks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import show, show_json
from distlab.curriculum import load_curriculum
from distlab.curriculum.path import is_judged_here

if TYPE_CHECKING:
    from distlab.grading.blind import Foreign
    from distlab.grading.verdict import TaskVerdict

NOT_ALL, ALL = 1, 0
LONG = 30  # words: a headline with more of them is read twice

Judged = tuple["Foreign", list["TaskVerdict"]]


def blind(
    folder: Path, *, seeds: int = 1, only: str = "", as_json: bool = False
) -> int:
    """Judge a set; return 0 if all wrong solutions and no right ones were rejected.

    Each solution is judged with `seeds` different seeds. If the verdicts differ, it
    counts as misjudged.

    Raises:
        BlindSetError: the folder holds no set, or a solution of it can't be used.
    """
    from distlab.grading.blind import read_set
    from distlab.grading.mutants import SEED, judge_set
    from distlab.ranks import new_cluster

    curriculum = load_curriculum()
    here = {task.id for task in curriculum.tasks if is_judged_here(task)}
    chosen = [
        solution
        for solution in read_set(curriculum, folder)
        if solution.task in here and only in solution.id
    ]
    with new_cluster() as cluster:
        judged = judge_set(
            curriculum,
            cluster,
            chosen,
            [SEED + i for i in range(seeds)],
            (lambda *_: None) if as_json else _tell,
        )
    report = summary(judged)
    if as_json:
        rows = [_row(solution, verdicts) for solution, verdicts in judged]
        show_json({**report, "solutions": rows})
    else:
        show([("plain", f"{name:22} {value}") for name, value in report.items()])
    return ALL if all(map(_is_right, judged)) else NOT_ALL


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Count what happened to the wrong and to the right solutions of a set."""
    wrong = [verdicts for solution, verdicts in judged if solution.is_wrong]
    right = [verdicts for solution, verdicts in judged if not solution.is_wrong]
    rejected = [v[0] for v in wrong if {x.status for x in v} == {"fail"}]
    words = [len(verdict.message.split()) for verdict in rejected]
    return {
        "wrong": len(wrong),
        "wrong_rejected": len(rejected),
        "rejected_named": sum(bool(verdict.slug) for verdict in rejected),
        "right": len(right),
        "right_accepted": sum({x.status for x in v} == {"pass"} for v in right),
        "unlike_verdicts": sum(len({_kind(x) for x in v}) > 1 for _, v in judged),
        "words_median": statistics.median(words) if words else 0,
        "words_above_30": sum(count > LONG for count in words),
    }


def _kind(verdict: TaskVerdict) -> tuple[str, str, str]:
    failure = verdict.first_failure()
    return verdict.status, failure.id if failure else "", verdict.slug


def _is_right(judged: Judged) -> bool:
    solution, verdicts = judged
    wanted = "fail" if solution.is_wrong else "pass"
    return all(verdict.status == wanted for verdict in verdicts)


def _row(solution: Foreign, verdicts: Sequence[TaskVerdict]) -> dict[str, Any]:
    status, clause, slug = _kind(verdicts[0])
    return {
        "id": solution.id,
        "wrong": solution.is_wrong,
        "title": solution.title,
        "why": solution.why,
        "status": status,
        "clause": clause,
        "slug": slug,
        "message": verdicts[0].message,
        "seconds": round(verdicts[0].seconds, 3),
        "verdicts": len({_kind(verdict) for verdict in verdicts}),
    }


def _tell(solution: Foreign, verdicts: Sequence[TaskVerdict]) -> None:
    status, clause, slug = _kind(verdicts[0])
    word = {"fail": "rejected", "pass": "accepted"}.get(status, status)
    good = _is_right((solution, list(verdicts)))
    head = f"{solution.id:36} {word:9} {clause:3} {slug:24} {solution.title}"
    lines = [("dim" if good else "fail", head)]
    if verdicts[0].message:
        lines.append(("plain", f"      {verdicts[0].message}"))
    if len({_kind(verdict) for verdict in verdicts}) > 1:
        kinds = ", ".join(" ".join(_kind(verdict)).strip() for verdict in verdicts)
        lines.append(("fail", f"      unlike verdicts: {kinds}"))
    show(lines)
