"""The Store of a simulated run, which a node that isn't a rank keeps in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distlab.sim.faults import STORE
from distlab.sim.kernel import GaveUp
from distlab.sim.services import Question, Services, end

_HEAD_BYTES = 16  # what a request has besides its key and value


class Shelf:
    """The stored values, and the requests that wait for missing ones."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.watchers: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def clear(self) -> None:
        """Forget everything, because the process that kept it has ended."""
        self.stored.clear()
        self.watchers.clear()

    def put(self, key: str, value: bytes) -> bytes:
        """Store a value, and answer the requests that wait for it."""
        self.stored[key] = bytes(value)
        watchers, self.watchers = self.watchers, []
        for is_ready, answer in watchers:
            if is_ready():
                answer()
            else:
                self.watchers.append((is_ready, answer))
        return value


class SimStore:
    """One rank's view of the store."""

    def __init__(self, services: Services, shelf: Shelf, rank: int) -> None:
        self._services, self._shelf, self._rank = services, shelf, rank
        self._step = 0

    def set(self, key: str, value: bytes) -> None:
        """Implement `Store.set`."""
        self._ask("store.set", [key], len(value), lambda: self._shelf.put(key, value))

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Implement `Store.get`."""
        stored = self._shelf.stored
        reply: bytes = self._ask(
            "store.get", [key], 0, lambda: stored[key], lambda: key in stored, timeout_s
        )
        return reply

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Implement `Store.wait`."""
        stored, wanted = self._shelf.stored, list(keys)
        self._ask(
            "store.wait",
            wanted,
            0,
            lambda: b"",
            lambda: all(key in stored for key in wanted),
            timeout_s,
        )

    def add(self, key: str, amount: int) -> int:
        """Implement `Store.add`."""

        def act() -> bytes:
            total = int(self._shelf.stored.get(key, b"0")) + amount
            return self._shelf.put(key, str(total).encode())

        return int(self._ask("store.add", [key], 8, act))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Implement `Store.compare_set`."""

        def act() -> bytes:
            there = self._shelf.stored.get(key, b"")
            return self._shelf.put(key, desired) if there == expected else there

        size = len(expected) + len(desired)
        reply: bytes = self._ask("store.compare_set", [key], size, act)
        return reply

    def _ask(
        self,
        op: str,
        keys: list[str],
        num_bytes: int,
        act: Callable[[], bytes],
        is_ready: Callable[[], bool] = lambda: True,
        timeout_s: float | None = None,
    ) -> Any:
        services, rank = self._services, self._rank
        services.kernel.enter()
        self._step += 1
        question = Question(op, STORE)

        def answer() -> None:
            reply, error = b"", None
            try:
                reply = act()
            except ValueError:
                error = ValueError(f"{op}: {keys[0]!r} holds no integer")
            services.post(
                STORE,
                rank,
                _HEAD_BYTES + len(reply),
                lambda: end(services, question, error, reply),
                reliable=True,
            )

        def arrive() -> None:
            if STORE in services.nodes.down:
                end(services, question, GaveUp())
            elif is_ready():
                answer()
            else:
                self._shelf.watchers.append((is_ready, answer))

        size = _HEAD_BYTES + num_bytes + sum(len(key) for key in keys)
        services.post(rank, STORE, size, arrive, reliable=True)
        return services.ask(
            rank,
            self._step,
            question,
            float("inf") if timeout_s is None else timeout_s,
        )
