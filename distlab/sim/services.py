"""Clock, Store and Endpoint of a simulated rank, with the faults of the run.

Endpoint  a message, like a datagram: it can be lost, arrive twice, or vanish at a
          partition. Only who is dead answers at once: "connection closed".
Store     kept by rank 0, reliable: at a partition a request waits until it heals
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distlab.comm import Handle, PeerLost
from distlab.sim.channels import Group
from distlab.sim.conditions import Conditions
from distlab.sim.kernel import Flight, Lost
from distlab.sim.net.links import PS, picoseconds

SERVICE_TAG = -1
"""Of messages of a Store or Endpoint, in a trace."""
_KEEPER = 0  # the rank that keeps the store
_HEAD_BYTES = 16  # what a request has besides its key and value


class Computing(Flight):
    """Time that a rank needs for itself: nobody else can shorten it."""

    def call(self) -> dict[str, Any]:
        """See `Flight.call`."""
        return {"n": 0, "op": "sleep"}


class Question(Flight):
    """Something asked of one rank; `reply` is there when it is done."""

    __slots__ = ("op", "peer", "reply")

    def __init__(self, op: str, peer: int) -> None:
        super().__init__()
        self.op, self.peer = op, peer
        self.reply: Any = None

    def awaited(self) -> tuple[int, ...]:
        """See `Flight.awaited`."""
        return (self.peer,)

    def call(self) -> dict[str, Any]:
        """See `Flight.call`."""
        return {"n": 0, "op": self.op, "dst": self.peer}


class SimClock:
    """Virtual time; a straggler needs more of it."""

    def __init__(self, world: Group, factor: float = 1.0) -> None:
        self._kernel, self._factor = world.kernel, factor

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`.

        Raises:
            ValueError: a negative time, or one without an end.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"sleep({seconds}): seconds, 0 or more, and finite")
        kernel, flight = self._kernel, Computing()
        until_ps = kernel.now_ps + picoseconds(seconds * self._factor)
        kernel.at(until_ps, kernel.end, flight)
        kernel.wait(flight, None)


class Services:
    """What the ranks of one run share: who answers, and what is stored."""

    def __init__(self, world: Group, conditions: Conditions | None) -> None:
        self.world, self.kernel = world, world.kernel
        self.conditions = conditions
        self.handles: dict[int, Handle] = {}
        self.early: dict[int, list[Callable[[], None]]] = {}  # before anyone serves
        self.asked: set[Question] = set()
        self.stored: dict[str, bytes] = {}
        self.watchers: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def ask(self, rank: int, step: int, question: Question, timeout_s: float) -> Any:
        """Wait for the reply; it is on its way already.

        Raises:
            PeerLost: it does not come.
        """
        kernel, started = self.kernel, self.kernel.now_ps
        self.asked.add(question)
        limit_ps = None if timeout_s == float("inf") else picoseconds(timeout_s)
        try:
            in_time = kernel.wait(question, limit_ps)
        finally:
            self.asked.discard(question)
        if in_time and question.error is None:
            return question.reply
        if in_time and question.error and not isinstance(question.error, Lost):
            raise question.error
        waited_s = (kernel.now_ps - started) / PS
        raise PeerLost(rank, step, question.peer, waited_s)

    def reap(self, rank: int) -> None:
        """A rank is dead: who waits for its answer gets none."""
        self.handles.pop(rank, None)
        for question in list(self.asked):
            if question.peer == rank and not question.done:
                self.kernel.end(question, Lost())

    def finish(self, rank: int) -> None:
        """A rank's program has ended: it serves no more."""
        self.handles.pop(rank, None)

    def post(
        self,
        src: int,
        dst: int,
        num_bytes: int,
        arrive: Callable[[], object],
        *,
        reliable: bool = False,
    ) -> None:
        """Send something that may not arrive, or twice, unless it is `reliable`."""
        if src == dst:
            self.kernel.at(self.kernel.now_ps, arrive)
            return
        conditions, now_ps = self.conditions, self.kernel.now_ps
        if conditions is not None and conditions.is_cut((src, dst), now_ps):
            if reliable:
                again = (src, dst, num_bytes, arrive)
                self.kernel.at(conditions.heals_ps, self._post_reliably, *again)
            return
        self._travel(src, dst, num_bytes, arrive, reliable)
        if conditions is not None and not reliable and conditions.luck.doubles():
            conditions.num_duplicates += 1
            self._travel(src, dst, num_bytes, arrive, reliable)

    def _post_reliably(self, *parts: Any) -> None:
        self.post(*parts, reliable=True)

    def _travel(
        self,
        src: int,
        dst: int,
        num_bytes: int,
        arrive: Callable[[], object],
        reliable: bool,
    ) -> None:
        world, now_ps = self.world, self.kernel.now_ps
        start, end = world.wires.message(src, dst, num_bytes, now_ps)
        if world.trace is not None:
            world.trace.append((src, dst, num_bytes, start, end, SERVICE_TAG))
        conditions = self.conditions
        if reliable or conditions is None or not conditions.luck.loses():
            self.kernel.at(end, arrive)


class SimEndpoint:
    """One rank's end of the calls."""

    def __init__(self, services: Services, rank: int) -> None:
        self._services, self._rank = services, rank
        self._step = 0

    def serve(self, handle: Handle) -> None:
        """See `Endpoint.serve`."""
        services = self._services
        services.kernel.enter()
        services.handles[self._rank] = handle
        for arrive in services.early.pop(self._rank, ()):
            services.kernel.at(services.kernel.now_ps, arrive)

    def call(self, peer: int, message: bytes, timeout_s: float) -> bytes:
        """See `Endpoint.call`.

        Raises:
            ValueError: there is no such rank.
            TypeError: the message is no bytes.
        """
        services = self._services
        n = len(services.world.members)
        if not isinstance(peer, int) or not 0 <= peer < n:
            raise ValueError(f"call to rank {peer}, but there is only rank 0 … {n - 1}")
        if not isinstance(message, bytes):
            raise TypeError(f"a message is bytes, not {type(message).__name__}")
        services.kernel.enter()
        self._step += 1
        question = Question("call", peer)

        def arrive() -> None:
            self._handle(question, message)

        services.post(self._rank, peer, len(message), arrive)
        reply: bytes = services.ask(self._rank, self._step, question, timeout_s)
        return reply

    def _handle(self, question: Question, message: bytes) -> None:
        """The message is at the peer's; this happens there."""
        services, peer = self._services, question.peer
        if peer in services.world.gone:
            services.post(peer, self._rank, 0, lambda: _end(services, question, Lost()))
            return
        handle = services.handles.get(peer)
        if handle is None:
            waiting = services.early.setdefault(peer, [])
            waiting.append(lambda: self._handle(question, message))
            return
        reply, error = b"", None
        try:
            reply = services.kernel.on_behalf_of(
                peer, lambda: handle(self._rank, message)
            )
        except Exception as raised:
            what = f"{type(raised).__name__}: {raised}"
            error = RuntimeError(f"rank {peer} could not answer: {what}")
        services.post(
            peer, self._rank, len(reply), lambda: _end(services, question, error, reply)
        )


def _end(
    services: Services, question: Question, error: Exception | None, reply: Any = None
) -> None:
    if not question.done:  # or else this is the second copy of a reply
        question.reply = reply
        services.kernel.end(question, error)


class SimStore:
    """One rank's view of the store."""

    def __init__(self, services: Services, rank: int) -> None:
        self._services, self._rank = services, rank
        self._step = 0

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        self._ask("store.set", [key], len(value), lambda: self._put(key, value))

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """See `Store.get`."""
        stored = self._services.stored
        reply: bytes = self._ask(
            "store.get", [key], 0, lambda: stored[key], lambda: key in stored, timeout_s
        )
        return reply

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """See `Store.wait`."""
        stored, wanted = self._services.stored, list(keys)
        self._ask(
            "store.wait",
            wanted,
            0,
            lambda: b"",
            lambda: all(key in stored for key in wanted),
            timeout_s,
        )

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""

        def act() -> bytes:
            total = int(self._services.stored.get(key, b"0")) + amount
            return self._put(key, str(total).encode())

        return int(self._ask("store.add", [key], 8, act))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See `Store.compare_set`."""

        def act() -> bytes:
            there = self._services.stored.get(key, b"")
            return self._put(key, desired) if there == expected else there

        size = len(expected) + len(desired)
        reply: bytes = self._ask("store.compare_set", [key], size, act)
        return reply

    def _put(self, key: str, value: bytes) -> bytes:
        """At the keeper's: store it, and answer those who wait for it."""
        services = self._services
        services.stored[key] = bytes(value)
        watchers, services.watchers = services.watchers, []
        for is_ready, answer in watchers:
            if is_ready():
                answer()
            else:
                services.watchers.append((is_ready, answer))
        return value

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
        question = Question(op, _KEEPER)

        def answer() -> None:
            reply, error = b"", None
            try:
                reply = act()
            except ValueError:
                error = ValueError(f"{op}: {keys[0]!r} holds no integer")
            services.post(
                _KEEPER,
                rank,
                _HEAD_BYTES + len(reply),
                lambda: _end(services, question, error, reply),
                reliable=True,
            )

        def arrive() -> None:
            if _KEEPER in services.world.gone:
                _end(services, question, Lost())
            elif is_ready():
                answer()
            else:
                services.watchers.append((is_ready, answer))

        size = _HEAD_BYTES + num_bytes + sum(len(key) for key in keys)
        services.post(rank, _KEEPER, size, arrive, reliable=True)
        return services.ask(
            rank,
            self._step,
            question,
            float("inf") if timeout_s is None else timeout_s,
        )
