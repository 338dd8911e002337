"""The key-value store of a process group: one for all ranks, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from distlab.sim.net.links import picoseconds
from distlab.sim.torch.rank import Rank
from distlab.sim.torch.shared_store import Awaited

_Base: Any = Store


class SimStore(_Base):  # type: ignore[misc]
    """One rank's view of the shared store; a look at it takes no virtual time."""

    def __init__(self, rank: Rank, name: str = "") -> None:
        """`name` is that of a store made by hand; the group's own has none."""
        super().__init__()
        self._rank = rank
        self._shared = rank.shared.named[name] if name else rank.shared
        self._values: dict[str, bytes] = self._shared.values

    def set(self, key: str, value: Any) -> None:
        """Put a value there; whoever waits for the key goes on."""
        self._put(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one."""
        self.wait([key])
        return bytes(self._values[key])

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the first time to 0."""
        number = int(self._values.get(key, b"0")) + amount
        self._put(key, str(number).encode())
        return number

    def append(self, key: str, value: Any) -> None:
        """Add to the end of a value."""
        self._put(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set it if it is what is expected, or if nothing is and nothing is there."""
        wanted, new = _bytes(expected), _bytes(desired)
        found = self._values.get(key)
        if found == wanted or (found is None and not wanted):
            self._put(key, new)
            return new
        return wanted if found is None else found

    def delete_key(self, key: str) -> bool:
        """Whether there was one."""
        return self._values.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815 - torch asks for both names

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, as soon as all are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Put several there."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether append and the calls for several keys work."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Of a rank that waits forever the kernel knows without a timeout."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let virtual time pass until all keys are there.

        Raises:
            dist.DistStoreError: they are not there in time.
        """
        self._rank.settle()
        limit_ps = picoseconds(timeout.total_seconds()) if timeout else None
        me = self._rank.number
        others = tuple(r for r in range(self._rank.world_size) if r != me)
        for key in keys:
            if key in self._values:
                continue
            flight = Awaited(key, others)
            self._shared.waiting[key].append(flight)
            if not self._rank.kernel.wait(flight, limit_ps):
                raise dist.DistStoreError(f"wait timeout, key {key!r}")

    def _put(self, key: str, value: bytes) -> None:
        self._rank.settle()
        self._values[key] = value
        for flight in self._shared.waiting.pop(key, ()):
            self._rank.kernel.end(flight)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
