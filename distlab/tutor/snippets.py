"""Run n ranks in this process and in virtual time, for the concepts' snippets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distlab.comm import Comm
from distlab.runner import RankContext
from distlab.sim import run

T = TypeVar("T")


def on_ranks(world_size: int, program: Callable[[Comm], T]) -> list[T]:
    """Run `program(comm)` on simulated ranks, and return the result of each rank.

    Raises:
        RuntimeError: the ranks did not finish, or their calls do not match. The message
            says what happened, and gives each rank's call with its line.
    """
    done = run(_with_comm, world_size, program)
    if done.outcome == "finished" and not any(record.journal for record in done.ranks):
        return list(done.values)
    # Load the grader only if a rank sent something, because loading takes a while.
    from distlab.grading.diagnosis import diagnose, diagnose_finished
    from distlab.grading.report import evidence_lines
    from distlab.grading.verdict import NotYetError

    try:
        if done.outcome != "finished":
            raise diagnose(done)
        diagnose_finished(done)
    except NotYetError as wrong:
        head = f"{done.outcome}: " if done.outcome != "finished" else ""
        rule = [f"  → {wrong.rule}"] if wrong.rule else []
        lines = [f"{head}{wrong.message}", *evidence_lines(wrong.evidence), *rule]
        raise RuntimeError("\n".join(lines)) from None
    return list(done.values)


def _with_comm(context: RankContext, program: Callable[[Comm], Any]) -> Any:
    return program(context.comm)
