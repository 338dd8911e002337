"""Within backward(): one call for each bucket, in the same order on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.autograd import Variable

from distlab.given.zero.buckets import Bucket


class Reducer(Protocol):
    """What is called for each bucket."""

    def reduce_bucket(self, bucket: Bucket) -> None:
        """The bucket's gradients are ready; those of unused parameters are None."""


class Backward:
    """Calls `reducer.reduce_bucket` for each bucket in each backward().

    From the last bucket to the first; each as soon as its own gradients and those of
    all later ones are there. What waits for a parameter that was not used is reduced
    at the end of this backward(): so every rank calls it equally often.

    Every rank calls backward() equally often. With several in one step, each reaches
    a trained parameter on every rank.
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
        """Called within backward(): if it is a new one, all buckets are unreduced."""
        if self.is_going_on:
            return
        self._prepare()
        # torch calls it when all gradients of this backward() are there.
        Variable._execution_engine.queue_callback(self._end)

    def finish(self) -> None:
        """After the last backward(): reduce what no backward() has reached.

        Raises:
            RuntimeError: a backward() has not ended.
        """
        self._expect_ended()
        if not self.num_ended:  # on this rank; on others there may have been one
            self._prepare()
            self._end()
        self.num_ended = 0

    def reset(self) -> None:
        """Forget all gradients, also of a backward() that raised."""
        self.is_going_on, self.num_ended = False, 0

    def _prepare(self) -> None:
        self.is_going_on = True
        self.unreduced = list(self.buckets)
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}

    def end_of(self, buckets: list[Bucket]) -> None:
        """Called within backward(): no more gradients of these buckets will come."""
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
    """Whether this is code that backward() calls, such as a checkpoint's forward."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
