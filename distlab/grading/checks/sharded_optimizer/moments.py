"""Memory within a step: what one call of the learner's leaves, or holds at most.

After a step all may be well again; how much a rank needs is decided in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.checks.sharded_optimizer.half import SLACK
from distlab.grading.kit.live_bytes import LiveBytes
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

T = TypeVar("T")
Told = list[list[Any]]
"""For each call that held too much: which, the bucket's first name, bytes too many."""


class Inside(Wrapper):
    """A communicator that knows whether one of its calls is going on.

    What the transport needs in memory meanwhile is not the learner's.
    """

    is_inside = False

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        self.is_inside = True
        try:
            return proceed()
        finally:
            self.is_inside = False

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return Inside(group)


def watched(comm: Comm) -> Comm:
    """The communicator for what `watching` gives.

    Not with one or two ranks: these meet on gloo, which has buffers of its own.
    """
    return Inside(comm) if comm.world_size > 2 else comm


def watching(base: Any, memory: LiveBytes, told: Told, comm: Comm) -> Any:
    """A subclass of stage 2 or 3 that looks at the memory around its calls."""
    if not isinstance(comm, Inside):
        return base
    inside: Inside = comm

    class Watching(base):  # type: ignore[misc]
        def reduce_bucket(self, bucket: Any) -> None:
            gradients = [p.grad for p in bucket.parameters if p.grad is not None]
            freed = sum(map(_bytes, gradients)) - (
                _bytes(bucket.shard) if bucket.shard.grad is None else 0
            )
            del gradients
            allowed = memory.live - freed + SLACK
            super().reduce_bucket(bucket)
            if freed > 2 * SLACK:
                _note(told, "reduce", bucket, memory.settled(allowed) - allowed)

        def unshard_bucket(self, bucket: Any) -> None:
            call = super().unshard_bucket
            _hold(told, memory, inside, "unshard", bucket, lambda: call(bucket))

        def prefetch(self, bucket: Any) -> Any:
            call = super().prefetch
            return _hold(told, memory, inside, "prefetch", bucket, lambda: call(bucket))

    return Watching


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _note(told: Told, call: str, bucket: Any, over: int) -> None:
    if over > 0:
        told.append([call, bucket.names[0], over])


def _hold(
    told: Told,
    memory: LiveBytes,
    comm: Inside,
    name: str,
    bucket: Any,
    call: Callable[[], Any],
) -> Any:
    """At most `bucket.flat` comes to what is alive while a call goes on."""
    there = bucket.flat.untyped_storage().nbytes()
    allowed = memory.live + _bytes(bucket.flat) - there + SLACK
    before, most = memory.look, [0]

    def look() -> None:
        if not comm.is_inside:
            most[0] = max(most[0], memory.live)
        if before is not None:
            before()

    memory.look = look
    try:
        found = call()
    finally:
        memory.look = before
    _note(told, name, bucket, most[0] - allowed)
    return found


def expect_freed(run: Run) -> None:
    """No call of reduce_bucket has left full gradients in memory.

    Raises:
        NotYetError: one has.
    """
    for record in run.ranks:
        for call, name, over in record.value["told"]:
            if call == "reduce":
                raise NotYetError(
                    f"after reduce_bucket for the bucket of `{name}`, rank "
                    f"{record.rank} still holds {over} bytes too many, expected only "
                    "weights and the shards' gradients",
                    slug="full-gradients-kept",
                    rule="once a rank has its chunk it needs no full gradient; a view "
                    "of a chunk keeps the memory of the full vector",
                )


def expect_no_copy(run: Run, *calls: str) -> None:
    """No call has held the full weights of a bucket twice.

    Raises:
        NotYetError: one has.
    """
    for record in run.ranks:
        for call, name, over in record.value["told"]:
            if call in calls:
                where = "unshard_bucket" if call == "unshard" else call
                raise NotYetError(
                    f"in {where} for the bucket of {name}, rank {record.rank} holds "
                    f"{over} bytes too many, expected only its shards and one full copy"
                )
