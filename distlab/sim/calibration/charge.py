"""Run as on a measured machine, and charge each rank's computation to its clock.

    total += box          counted as it runs: one operation on so many bytes
    comm.send(total, 1)   first the clock moves on by what was counted, then it sends

A simulated rank really computes, but the time that this takes on a busy machine must
not show, because the same run must give the same times. We therefore count torch's
operations, and charge for each of them what a table says for its bytes
(`Piecewise.operation_s`).

Limits: we assume that an operation costs as much as adding two tensors of the size of
its largest one, so products of matrices come out too cheap. An operation that only
views a tensor differently, or only allocates memory, is charged as one of 0 bytes.
Python itself and code outside torch cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.comm import Call, Clock, Comm, Work, Wrapper
from distlab.runner import RankContext
from distlab.sim.comm import SimComm
from distlab.sim.conditions import SlowWires
from distlab.sim.kernel import Kernel
from distlab.sim.net.measured import MeasuredPorts
from distlab.sim.run import SimRun, run

T = TypeVar("T")
Seconds = Callable[[float], float]
"""Returns an operation's seconds, given its bytes."""


def run_charged(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    operation_s: Seconds,
    **options: Any,
) -> SimRun:
    """Call `sim.run` with the ranks' operations charged; `options` are those of `run`.

    Raises:
        ValueError: as in `sim.run`.
    """
    meter = Meter(operation_s)
    with meter:
        return run(meter.charged(program), world_size, *args, **options)


@contextmanager
def uncharged(comm: Comm) -> Iterator[None]:
    """Charge nothing in this block, in which a rank prepares or looks at results."""
    account = comm._account if isinstance(comm, Charged) else None
    if account is not None:
        account.in_call = True
    try:
        yield
    finally:
        if account is not None:
            account.in_call = False


class Meter(TorchDispatchMode):
    """Counts operations, while it is active, for the rank whose turn it is."""

    def __init__(self, operation_s: Seconds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation_s = operation_s
        self._thread = threading.get_ident()
        self._kernel: Kernel | None = None
        self._accounts: dict[int, Account] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        fiber = self._kernel.current if self._kernel else None
        account = self._accounts.get(fiber.rank) if fiber else None
        if account is not None and not account.in_call:
            account.owed_s += self._operation_s(_bytes_of(func, args, out))
        return out

    def charged(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return the program with a communicator that pays before every call."""
        return partial(self._live, program)

    def _live(
        self, program: Callable[..., Any], context: RankContext, *args: Any
    ) -> Any:
        self._kernel = _innermost(context.comm).group.kernel
        account = self._accounts[context.rank] = Account(context.clock)
        comm = Charged(context.comm, account)
        # A mode holds for a thread: greenlets have this one's, other carriers do not.
        is_here = threading.get_ident() == self._thread
        with nullcontext() if is_here else self:
            value = program(replace(context, comm=comm), *args)
        account.settle()
        return value


class Account:
    """Computation of one rank that its clock doesn't show yet."""

    def __init__(self, clock: Clock) -> None:
        self.owed_s = 0.0
        self.in_call = False  # then it is the simulator that copies, not the rank
        self._clock = clock

    def settle(self) -> None:
        """Add the computation to the clock."""
        owed_s, self.owed_s = self.owed_s, 0.0
        if owed_s:
            self._clock.sleep(owed_s)

    def outside(self, proceed: Callable[[], T]) -> T:
        """Call `proceed()` at the right time, without counting it as computation."""
        self.in_call = True
        try:
            self.settle()
            return proceed()
        finally:
            self.in_call = False


class Charged(Wrapper):
    """A simulated rank's communicator, whose clock catches up before every call."""

    def __init__(self, inner: Comm, account: Account) -> None:
        super().__init__(inner)
        self._account = account
        group = _innermost(inner).group
        wires = group.wires
        # A straggler's are around those of the network.
        wires = wires._wires if isinstance(wires, SlowWires) else wires
        self._measured = wires if isinstance(wires, MeasuredPorts) else None
        self._number = group.members[inner.rank]

    def time(self) -> float:
        """Implement `Comm.time`."""
        return self._account.outside(super().time)

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.op == "sendrecv" and self._measured is not None:
            return self._account.outside(lambda: self._exchange(call, proceed))
        result = self._account.outside(proceed)
        if call.blocking:
            return result
        return _ChargedWork(result, self._account)  # type: ignore[return-value,arg-type]

    def _exchange(self, call: Call, proceed: Callable[[], T]) -> T:
        """Mark an exchange while it lasts, because a single message takes longer."""
        assert self._measured is not None
        sizes = [t.nbytes for t in (call.sent, call.received) if t is not None]
        self._measured.exchange(self._number, min(sizes))
        try:
            return proceed()
        finally:
            self._measured.exchange(self._number, None)

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return Charged(group, self._account)


class _ChargedWork:
    """A Work whose clock catches up before `wait`."""

    def __init__(self, work: Work, account: Account) -> None:
        self._work, self._account = work, account

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        self._account.outside(lambda: self._work.wait(timeout_s))

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._account.outside(self._work.is_completed)


def _innermost(comm: Any) -> SimComm:
    while isinstance(comm, Wrapper):
        comm = comm._inner
    assert isinstance(comm, SimComm), "only simulated ranks are charged"
    return comm


def _bytes_of(func: Any, args: Any, out: Any) -> int:
    """Return how many bytes an operation handles: those of its largest tensor."""
    if func.is_view or _only_makes_room(func):
        return 0
    found = [*args, out]
    for group in list(found):
        if isinstance(group, (list, tuple)):
            found.extend(group)
    return max((t.nbytes for t in found if isinstance(t, torch.Tensor)), default=0)


def _only_makes_room(func: Any) -> bool:
    return func._schema.name.partition("::")[2] in _MAKES_ROOM


_MAKES_ROOM = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
