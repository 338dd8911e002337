"""What the snippets of the concepts use: n ranks in this process, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distlab.comm import Comm
from distlab.runner import RankContext
from distlab.sim import run

T = TypeVar("T")


def on_ranks(world_size: int, program: Callable[[Comm], T]) -> list[T]:
    """Run `program(comm)` on simulated ranks; return what each rank returned.

    Raises:
        RuntimeError: the ranks did not finish, or their calls do not fit together: it
            says what happened, and each rank's call with its line.
    """
    done = run(_with_comm, world_size, program)
    if done.outcome == "finished" and not any(record.journal for record in done.ranks):
        return list(done.values)
    # Only where something was sent: loading the grader takes a while.
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
