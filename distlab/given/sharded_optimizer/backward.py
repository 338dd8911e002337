"""Call a function per bucket during backward(), in the same order on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.autograd import Variable

from distlab.given.sharded_optimizer.buckets import Bucket


class Reducer(Protocol):
    """The interface that `Backward` calls for each bucket."""

    def reduce_bucket(self, bucket: Bucket) -> None:
        """Reduce the bucket's gradients; they are ready, or None if unused."""


class Backward:
    """Calls `reducer.reduce_bucket` for each bucket in each backward().

    It goes from the last bucket to the first, and calls each as soon as its own
    gradients and those of all later buckets are ready. Buckets that still wait for the
    gradient of an unused parameter are reduced at the end of this backward(), so that
    every rank makes the same number of calls.

    Every rank must call backward() equally often. If there are several calls in one
    step, each must reach a trained parameter on every rank.
    """

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        self.reducer = reducer
        self.buckets: list[Bucket] = []
        self.unreduced: list[Bucket] = []  # in this backward()
        self.missing: dict[Bucket, set[nn.Parameter]] = {}
        self.is_going_on = False
        self.num_ended = 0  # since the last step
        model.register_forward_pre_hook(self._expect_ended)

    def add(self, bucket: Bucket) -> None:
        """Watch the bucket's parameters."""
        self.buckets.append(bucket)
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(
                partial(self._mark_ready, bucket)
            )

    def begin(self) -> None:
        """Mark all buckets as unreduced when a new backward() begins.

        Hooks call this within backward(), so it does nothing if that one has begun
        already.
        """
        if self.is_going_on:
            return
        self._prepare()
        # torch calls it when all gradients of this backward() are there.
        Variable._execution_engine.queue_callback(self._end)

    def finish(self) -> None:
        """Reduce the rest after the last backward(), if this rank had none.

        Raises:
            RuntimeError: a backward() hasn't ended.
        """
        self._expect_ended()
        if not self.num_ended:  # on this rank; on others there may have been one
            self._prepare()
            self._end()
        self.num_ended = 0

    def reset(self) -> None:
        """Forget all gradients, even those of a backward() that raised."""
        self.is_going_on, self.num_ended = False, 0

    def _prepare(self) -> None:
        self.is_going_on = True
        self.unreduced = list(self.buckets)
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}

    def end_of(self, buckets: list[Bucket]) -> None:
        """Note within backward() that no more gradients of these buckets will come."""
        self.begin()
        for bucket in buckets:
            self.missing[bucket].clear()
        self._reduce_ready()

    def _mark_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        self.begin()
        self.missing[bucket].discard(parameter)
        self._reduce_ready()

    def _reduce_ready(self) -> None:
        while self.unreduced and not self.missing[self.unreduced[-1]]:
            self.reducer.reduce_bucket(self.unreduced.pop())

    def _end(self) -> None:
        while self.unreduced:
            self.reducer.reduce_bucket(self.unreduced.pop())
        self.is_going_on = False
        self.num_ended += 1

    def _expect_ended(self, *_: Any) -> None:
        if self.is_going_on and not _is_within_backward():
            raise RuntimeError(
                "the last backward() raised an error, and some gradients are already "
                "reduced: call zero_grad() on all ranks, then go on"
            )


def _is_within_backward() -> bool:
    """Return True in code that backward() calls, such as a checkpoint's forward."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
