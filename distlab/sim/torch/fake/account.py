"""One rank's memory by what it is for, now and at its peak.

What a storage is for is often known only later: a tensor made in backward() turns out
to be a parameter's gradient, one made in step() to be the optimizer's. `Watch.become`
moves its bytes then, also in the picture of the peak, if it was there at the time.
"""

from __future__ import annotations

import weakref
from typing import Any

from distlab.sim.torch.tally import Tally

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "other")
PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(KINDS))


class Watch(weakref.ref):  # type: ignore[type-arg]
    """A storage that is in an account, until it is freed."""

    __slots__ = ("account", "kind", "num_bytes", "since")
    account: Account
    kind: int
    num_bytes: int
    since: int  # the change with which it came

    def become(self, kind: int) -> None:
        """It is for this, and it was from the beginning."""
        if kind == self.kind:
            return
        account, before = self.account, self.kind
        account.now[before] -= self.num_bytes
        account.now[kind] += self.num_bytes
        if self.since <= account.peak_at:
            account.then[before] -= self.num_bytes
            account.then[kind] += self.num_bytes
        self.kind = kind

    def resize(self, num_bytes: int) -> None:
        """Part of it is given back, or taken again: such are gathered parameters."""
        account = self.account
        self.become(GATHERED)
        account.move(GATHERED, -self.num_bytes)
        self.num_bytes = num_bytes
        account.num_changes += 1
        self.since = account.num_changes
        account.move(GATHERED, num_bytes)


class Account(Tally):
    """The bytes of one rank's fake tensors, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.now = [0] * len(KINDS)
        self.then = [0] * len(KINDS)  # at the run's peak
        self.num_changes = 0
        self.peak_at = 0  # the change after which there was most
        # A weak reference must outlive its storage.
        self._watches: dict[int, Watch] = {}

    def add(self, storage: Any, num_bytes: int, kind: int) -> None:
        """A storage was made."""
        watch = Watch(storage, _freed)
        watch.account, watch.kind, watch.num_bytes = self, kind, num_bytes
        self.num_changes += 1
        watch.since = self.num_changes
        storage._distlab_watch = watch
        self._watches[id(watch)] = watch
        self.move(kind, num_bytes)

    def move(self, kind: int, num_bytes: int) -> None:
        """So many bytes more, or less."""
        self.now[kind] += num_bytes
        if self.change(num_bytes):
            self.peak_at = self.num_changes
            self.then[:] = self.now

    def drop(self, watch: Watch) -> None:
        """A storage was freed."""
        del self._watches[id(watch)]
        self.move(watch.kind, -watch.num_bytes)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind, at the time when there were most."""
        return dict(zip(KINDS, self.then, strict=True))


def _freed(watch: Watch) -> None:
    watch.account.drop(watch)


def become(tensor: Any, kind: int) -> None:
    """A tensor's storage is for this; nothing happens if it is in no account."""
    local = getattr(tensor, "_local_tensor", tensor)
    watch = getattr(local.untyped_storage(), "_distlab_watch", None)
    if watch is not None:
        watch.become(kind)
