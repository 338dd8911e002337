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
        RuntimeError: the ranks did not finish; one sentence says why.
    """
    done = run(_with_comm, world_size, program)
    if done.outcome != "finished":
        raise RuntimeError(f"{done.outcome}: {done.explanation}")
    return list(done.values)


def _with_comm(context: RankContext, program: Callable[[Comm], Any]) -> Any:
    return program(context.comm)
