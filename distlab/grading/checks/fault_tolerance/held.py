"""Disks, shards and threads that can be held up, for the checks of 4.13.

What a thread does while training goes on depends on time. Here it waits at a known
place until the check lets it go on, so that a mistake shows in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor

from distlab.checkpoints import files as given
from distlab.comm import Call, Comm, DiskError, ReduceOp, Wrapper
from distlab.runner import RankContext
from distlab.sim import SimDisk

T = TypeVar("T")
LIMIT_S = 3.0  # after that a disk is held up no more: somebody waits for it
SOON_S, OVER_S = 0.3, 1.0


class HeldDisk(SimDisk):
    """A disk whose operations in a thread wait while it is held up."""

    def __init__(self) -> None:
        super().__init__()
        self._is_free = threading.Event()
        self._is_free.set()
        self.full = ""
        self.steps: list[int] = []  # of each operation
        self.was_in_main = self.was_waited_for = False

    def hold(self) -> None:
        """From now on operations in a thread wait."""
        self._is_free.clear()

    def free(self) -> None:
        """They go on."""
        self._is_free.set()

    def write(self, path: str, data: bytes) -> None:
        """See `Disk.write`."""
        self._pass(path)
        if self.full and self.full in path:
            raise DiskError(f'the disk is full: no room for all of "{path}"')
        super().write(path, data)

    def sync(self, path: str) -> None:
        """See `Disk.sync`."""
        self._pass(path)
        super().sync(path)

    def _pass(self, path: str) -> None:
        self.steps.append(given.step_of(path) or -1)
        if threading.current_thread() is threading.main_thread():
            self.was_in_main = True
        elif not self._is_free.wait(LIMIT_S):
            self.was_waited_for = True
            self._is_free.set()


class WatchedTensor(torch.Tensor):
    """Notes if a thread that is not the main one reads it."""

    was_read_later = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()


class WatchedDict(dict[str, Any]):
    """The same for the meta."""

    def items(self) -> Any:
        """See `dict.items`."""
        _note()
        return super().items()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: deepcopy(value) for name, value in self.items()}


class WatchedList(list[Any]):
    """The same for what is in the meta."""

    def __iter__(self) -> Any:
        _note()
        return super().__iter__()

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(self)


def _note() -> None:
    if threading.current_thread() is not threading.main_thread():
        WatchedTensor.was_read_later = True


def watched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that note who reads them."""
    return {name: t.clone().as_subclass(WatchedTensor) for name, t in tensors.items()}


# ── threads ─────────────────────────────────────────────────────────────────────────


class Gate:
    """Where a thread waits before it reads the tensors for a shard."""

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_free.set()
        self._encode = given.encode_shard
        self._came: list[threading.Thread] = []
        self.was_waited_for = False
        self.has_two = False  # one thread came while another one was held up

    def hold(self) -> None:
        """From now on threads wait."""
        self._is_free.clear()

    def free(self) -> None:
        """They go on."""
        self._is_free.set()

    def encode(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
        """See `encode_shard`."""
        if threading.current_thread() is not threading.main_thread():
            own = threading.current_thread()
            earlier = [one for one in self._came if one.is_alive() and one is not own]
            self.has_two |= bool(earlier)
            self._came.append(own)
            if not self._is_free.wait(LIMIT_S):
                self.was_waited_for = True
                self._is_free.set()
            for one in earlier:  # their messages must not meet
                threading.Thread.join(one, LIMIT_S)
        return self._encode(tensors, meta)


@contextmanager
def gated() -> Iterator[Gate]:
    """All shards are encoded behind a gate."""
    gate = Gate()
    given.encode_shard = gate.encode
    try:
        yield gate
    finally:
        given.encode_shard = gate._encode


class Started:
    """The threads that were started since this was made, and who waits for them.

    A join with a time limit ends at once, as if the disk were slower than any limit.
    """

    def __init__(self) -> None:
        self._before = set(threading.enumerate())
        self._is_joined = threading.Event()

    def watch(self) -> None:
        """From now on joins of these threads are seen."""
        for thread in self._threads():
            thread.join = self._joining(thread)  # type: ignore[method-assign]

    def _threads(self) -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one not in self._before]

    def _joining(self, thread: threading.Thread) -> Callable[..., None]:
        def join(timeout: float | None = None) -> None:
            if timeout is None:
                self._is_joined.set()
            limit = None if timeout is None else min(timeout, 0.01)
            threading.Thread.join(thread, limit)

        return join

    def free_when_joined(self, *held: Any) -> threading.Event:
        """Free `held` soon, or when somebody waits; the event is set then."""
        is_free = threading.Event()

        def later() -> None:
            self._is_joined.wait(SOON_S)
            is_free.set()
            for one in held:
                one.free()

        self._before.add(waiter := threading.Thread(target=later, daemon=True))
        waiter.start()
        return is_free

    def settle(self) -> None:
        """Wait for the end of these threads; one that waits for work has no end."""
        for thread in self._threads():
            threading.Thread.join(thread, OVER_S)
            self._before.add(thread)


class Broken(Wrapper):
    """A communicator whose calls in a thread raise `error`, on all ranks."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.error: Exception | None = None
        self.has_failed = threading.Event()

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        is_main = threading.current_thread() is threading.main_thread()
        if self.error is not None and not is_main:
            self.has_failed.set()
            raise self.error
        return proceed()


def on_all(context: RankContext, here: bool) -> bool:
    """Collective: whether it is so on every rank."""
    flag = torch.tensor([float(here)])
    context.comm.all_reduce(flag, ReduceOp.MIN)
    return bool(flag[0])
