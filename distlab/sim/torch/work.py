"""What torch gets back from an asynchronous call: a Work, and its Future."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from distlab.sim.channels import End
from distlab.sim.kernel import Flight
from distlab.sim.torch.rank import Rank

_POLL_S = 1e-6  # that a look at unfinished work takes: or else time would not pass


Underway = tuple[Callable[[float | None], object], Flight]
"""A call that was started: how to wait for it, and what the kernel waits for."""


class TorchWork(Work):
    """Calls under way that end together; `land` puts the results in place."""

    def __init__(
        self,
        rank: Rank,
        calls: Sequence[Underway],
        outputs: list[Tensor],
        land: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._rank, self.calls, self._outputs = rank, list(calls), outputs
        self._land = land
        self._future: WorkFuture | None = None
        self._landed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let virtual time pass until it is done; then the results are there."""
        self.wait_s(timeout.total_seconds() if timeout else None)
        return True

    def wait_s(self, timeout_s: float | None) -> None:
        """The same, with the limit in seconds; None is no limit."""
        if not self._landed:
            self._rank.settle()
            for wait, _ in self.calls:
                wait(timeout_s)
            self._finish()

    def _finish(self) -> None:
        self._landed = True
        if self._land is not None:
            self._land()
        if self._future is not None and not self._future.done():
            self._future.set_result(self._outputs)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done by now; to ask takes a microsecond."""
        self._rank.settle()
        if not self._is_over():
            self._rank.clock.sleep(_POLL_S)
        return self._landed or self._is_over()

    def is_success(self) -> bool:
        """Whether it is done, and without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, if it is known by now."""
        errors = (flight.error for _, flight in self.calls)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Tensor]:
        """The tensors with the results."""
        return self._outputs

    def source_rank(self) -> int:
        """Of a message from anyone: who sent it."""
        flight = self.calls[0][1]
        if not isinstance(flight, End):
            raise ValueError("only a message has a source rank")
        return flight.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A Future that is done when this is, at the latest when backward() ends."""
        if self._future is None:
            self._future = WorkFuture(self)
            if self._landed:
                self._future.set_result(self._outputs)
            elif torch._C._current_autograd_node() is not None:
                self._rank.drain_after_backward(self.wait)
            elif _is_torch_itself(sys._getframe(1)):
                self.wait_s(None)
        return self._future

    def _is_over(self) -> bool:
        return all(flight.done for _, flight in self.calls)


def _is_torch_itself(caller: FrameType) -> bool:
    """Whether the future may be waited for where the kernel cannot see it.

    DDP with a static graph, or under Join, waits in C++ for what it has just sent.
    """
    in_callback = torch._C._current_graph_task_id() != -1
    return in_callback or str(caller.f_globals.get("__name__")).startswith("torch.")


class WorkFuture(Future[Any]):
    """A Future of which the kernel knows that someone waits for it."""

    def __init__(self, work: TorchWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """See `torch.futures.Future.wait`."""
        self._work.wait()
        return super().wait()

    def done(self) -> bool:
        """See `torch.futures.Future.done`."""
        return super().done()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """See `torch.futures.Future.then`."""
        following = WorkFuture(self._work)

        def go_on(done: Future[Any]) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(go_on)
        return following
