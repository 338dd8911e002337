"""Carry a rank while others run: with a greenlet, or with an operating-system thread.

Both are functions that can be left in the middle and entered again, one at a time:

    greenlets   all on one thread; to go from one to the next takes a quarter of a
                microsecond. What is bound to the thread must be put aside by hand
                (grad mode), and inside backward() autograd's own bookkeeping cannot be
    threads     each rank has a thread and waits for the baton; 50 times as slow, and
                everything bound to a thread is the rank's own, also inside backward()

The kernel doesn't need to know which one it uses. It asks for one `Strand` per rank,
and passes control from one to the next. A strand that ends passes it to `hub`, the
strand that started the run.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Protocol

import torch

from distlab.runner import RunnerError

try:
    import greenlet  # type: ignore[import-untyped,unused-ignore]
except ImportError:  # said in one sentence as soon as one wants to simulate
    greenlet = None

CarrierName = Literal["greenlets", "threads"]
STACK_BYTES = 1 << 20
"""The stack of a rank's thread; only used pages take memory, so 1,024 ranks fit."""


class RankEnded(BaseException):
    """Raised in a rank that still waits when its run is over; don't catch it."""


class Strand(Protocol):
    """One line of execution, which changes only where it passes on control.

    `thread_id` is the thread on which it runs, or 0 before it runs. `switch` only
    enters it. If the carrier `hands_over`, that and the grad mode is all there is to
    do.
    """

    thread_id: int
    switch: Callable[[], object] | None

    @property
    def dead(self) -> bool:
        """True if the strand has finished."""

    def frame(self) -> FrameType | None:
        """The frame in which the strand has stopped."""


class Carrier(Protocol):
    """All strands of one run; the strand that creates it becomes its `hub`."""

    @property
    def hub(self) -> Strand:
        """The strand that started the run."""

    can_leave_backward: bool
    hands_over: bool

    def strand(self, main: Callable[[], object]) -> Strand:
        """Create a strand that calls `main` when the hub first switches to it."""

    def switch(self, strand: Any) -> None:
        """Leave the calling strand and enter `strand`; return when entered again.

        If a `main` raises anything but RankEnded, we raise it in the hub.
        """

    def close(self) -> None:
        """Free everything that ended strands held."""


def make_carrier(name: CarrierName) -> Carrier:
    """Create the carrier of that name, with the caller as its hub.

    Raises:
        RunnerError: you ask for greenlets, but the package isn't installed.
    """
    return ThreadCarrier() if name == "threads" else GreenletCarrier()


class _GreenletStrand:
    """A strand in a greenlet."""

    __slots__ = ("greenlet", "switch", "thread_id")

    def __init__(self, green: Any) -> None:
        self.greenlet = green
        self.switch: Callable[[], object] | None = green.switch
        self.thread_id = threading.get_ident()

    @property
    def dead(self) -> bool:
        """Implement `Strand.dead`."""
        return bool(self.greenlet.dead)

    def frame(self) -> FrameType | None:
        """Implement `Strand.frame`."""
        return self.greenlet.gr_frame  # type: ignore[no-any-return]


class GreenletCarrier:
    """Ranks as greenlets, all on the thread that creates this object.

    The grad mode belongs to the thread, so each rank restores its own when it
    continues. A rank that leaves stores the mode in `grad`, so that the next one
    needn't look it up.
    """

    can_leave_backward = False
    hands_over = True

    def __init__(self) -> None:
        if greenlet is None:
            raise RunnerError(
                "the simulated cluster needs the package greenlet: pip install greenlet"
            )
        self.hub = _GreenletStrand(greenlet.getcurrent())
        self.grad = _is_grad_enabled()

    def strand(self, main: Callable[[], object]) -> _GreenletStrand:
        """Implement `Carrier.strand`."""

        def live() -> None:
            torch._C._set_grad_enabled(True)
            try:
                main()
            except RankEnded:
                pass
            finally:
                self.grad = _is_grad_enabled()

        return _GreenletStrand(greenlet.greenlet(live, self.hub.greenlet))

    def switch(self, strand: _GreenletStrand) -> None:
        """Implement `Carrier.switch`."""
        grad = self.grad = _is_grad_enabled()
        strand.greenlet.switch()
        if self.grad is not grad:
            torch._C._set_grad_enabled(grad)

    def close(self) -> None:
        """Implement `Carrier.close`."""


class _ThreadStrand:
    """A strand in its own thread, or the hub in the thread that existed before."""

    def __init__(self, carrier: ThreadCarrier, main: Callable[[], object]) -> None:
        self.dead = False
        self.thread_id = 0
        self.switch: Callable[[], object] | None = None
        self.error: BaseException | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self._carrier, self._main = carrier, main
        self.thread: threading.Thread | None = None

    def frame(self) -> FrameType | None:
        """Implement `Strand.frame`."""
        return sys._current_frames().get(self.thread_id)

    def wake(self) -> None:
        """Give the baton to this strand."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._live, daemon=True)
            self.thread.start()
        else:
            self.baton.release()

    def _live(self) -> None:
        self.thread_id = threading.get_ident()
        try:
            self._main()
        except RankEnded:
            pass
        except BaseException as error:
            self.error = error
        self.dead = True
        self._carrier.running = self._carrier.hub
        self._carrier.hub.baton.release()


class ThreadCarrier:
    """Ranks as threads, of which only the one with the baton runs."""

    can_leave_backward = True
    hands_over = False

    def __init__(self) -> None:
        self.hub = _ThreadStrand(self, lambda: None)
        self.hub.thread = threading.current_thread()
        self.running = self.hub
        self._strands: list[_ThreadStrand] = []
        self._stack_before = threading.stack_size(STACK_BYTES)

    def strand(self, main: Callable[[], object]) -> _ThreadStrand:
        """Implement `Carrier.strand`."""
        strand = _ThreadStrand(self, main)
        self._strands.append(strand)
        return strand

    def switch(self, strand: _ThreadStrand) -> None:
        """Implement `Carrier.switch`."""
        own, self.running = self.running, strand
        if own is self.hub:
            self._run(strand)
        else:
            strand.wake()
            own.baton.acquire()

    def _run(self, strand: _ThreadStrand) -> None:
        try:
            strand.wake()
            self.hub.baton.acquire()
        except BaseException:  # Ctrl-C: it arrives here, while a rank starts or runs
            while not self.hub.baton.acquire(timeout=0.05):
                raise_in_thread(self.running.thread_id, RankEnded)
            raise
        for strand in self._strands:
            error, strand.error = strand.error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Implement `Carrier.close`."""
        threading.stack_size(self._stack_before)
        for strand in self._strands:
            if strand.dead and strand.thread is not None:
                strand.thread.join()


def raise_in_thread(thread_id: int, error: type[BaseException]) -> None:
    """Raise `error` in a thread of this process, at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(error)
    )


def clear_in_thread(thread_id: int) -> None:
    """Cancel an error that has not been raised in that thread yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)


_is_grad_enabled = torch.is_grad_enabled
