"""Record each rank's steps in a run, without the data, for `replay`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from distlab.comm import ANY, Comm
from distlab.comm._call import Call, Wrapper
from distlab.sim.net.links import picoseconds

T = TypeVar("T")
Name = tuple[int, int, int, int]
"""A message: source, destination, tag, and its number among those. Both ends find the
same name, because ends of a channel match in order."""

_KNOWN = ("send", "recv", "sendrecv", "isend", "irecv")


Kind = Literal["compute", "post", "wait"]


class RecordedStep(NamedTuple):
    """A step of one rank: its picoseconds of computation, or its message."""

    rank: int
    kind: Kind
    value: int


@dataclass
class RankSteps:
    """The steps of one rank, in order."""

    rank: int
    now_ps: int = 0
    steps: list[tuple[Kind, int | Name]] = field(default_factory=list)
    num_posted: Counter[tuple[bool, int, int, int]] = field(default_factory=Counter)
    sizes: dict[Name, int] = field(default_factory=dict)  # of what it sends

    def reach(self, now_s: float) -> None:
        """Note that the rank has computed until now."""
        now_ps = picoseconds(now_s)
        if now_ps > self.now_ps:
            self.steps.append(("compute", now_ps - self.now_ps))
        self.now_ps = now_ps

    def post(self, is_send: bool, peer: int, tag: int, num_bytes: int) -> Name:
        """Note that one end of a message is posted; return the message."""
        src, dst = (self.rank, peer) if is_send else (peer, self.rank)
        channel = (is_send, src, dst, tag)
        name = (src, dst, tag, self.num_posted[channel])
        self.num_posted[channel] += 1
        if is_send:
            self.sizes[name] = num_bytes
        self.steps.append(("post", name))
        return name

    def wait(self, name: Name, now_s: float) -> None:
        """Note that the rank has waited for a message until now."""
        self.steps.append(("wait", name))
        self.now_ps = picoseconds(now_s)


class Recorder(Wrapper):
    """Records when a rank makes a call, with which peer, and what it waits for."""

    def __init__(self, inner: Comm, log: RankSteps) -> None:
        super().__init__(inner)
        self.log = log

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.op not in _KNOWN:
            raise ValueError(f"{call.op} cannot be replayed, only sends and receives")
        if call.src == ANY:
            raise ValueError("recv from anyone cannot be replayed: who is first varies")
        self.log.reach(self.time())
        names = self._post(call)
        result = proceed()
        if not call.blocking:
            return _RecordedWork(result, self, names[0])  # type: ignore[return-value]
        for name in names:
            self.log.wait(name, self.time())
        return result

    def _post(self, call: Call) -> list[Name]:
        if call.src == call.dst == self.rank:
            return []  # one rank alone: nothing is sent
        ends = ((True, call.dst, call.sent), (False, call.src, call.received))
        return [
            self.log.post(is_send, peer, call.tag, tensor.nbytes)
            for is_send, peer, tensor in ends
            if peer is not None and tensor is not None
        ]


class _RecordedWork:
    """A Work whose wait is recorded."""

    def __init__(self, work: Any, recorder: Recorder, name: Name) -> None:
        self._work, self._recorder, self._name = work, recorder, name

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        recorder = self._recorder
        recorder.log.reach(recorder.time())
        self._work.wait(timeout_s)
        recorder.log.wait(self._name, recorder.time())

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return bool(self._work.is_completed())


def in_order(
    logs: list[RankSteps],
) -> tuple[list[RecordedStep], list[tuple[int, int, int]]]:
    """Return all steps, with each wait after both posts, and all messages by number.

    A message is (source, destination, bytes). We leave out messages that were never
    received, together with their posts.
    """
    posts = Counter(n for log in logs for kind, n in log.steps if kind == "post")
    sizes = {name: size for log in logs for name, size in log.sizes.items()}
    numbers = {name: i for i, name in enumerate(n for n in sizes if posts[n] == 2)}
    order = _Order([_numbered(log, numbers) for log in logs])
    hops = [(src, dst, sizes[src, dst, tag, k]) for src, dst, tag, k in numbers]
    return order.steps, hops


def _numbered(log: RankSteps, numbers: dict[Name, int]) -> deque[RecordedStep]:
    steps: deque[RecordedStep] = deque()
    for kind, what in log.steps:
        value = what if isinstance(what, int) else numbers.get(what)
        if value is not None:
            steps.append(RecordedStep(log.rank, kind, value))
    return steps


class _Order:
    """Goes through all ranks' steps, each as far as it can without the others."""

    def __init__(self, left: list[deque[RecordedStep]]) -> None:
        self.steps: list[RecordedStep] = []
        self._num_posted: Counter[int] = Counter()
        self._waiting: dict[int, list[int]] = {}  # ranks, by message
        self._ready = deque(range(len(left)))
        while self._ready:
            self._go_on(left[self._ready.popleft()])

    def _go_on(self, left: deque[RecordedStep]) -> None:
        while left:
            rank, kind, value = left[0]
            if kind == "wait" and self._num_posted[value] < 2:
                self._waiting.setdefault(value, []).append(rank)
                return
            self.steps.append(left.popleft())
            if kind == "post":
                self._num_posted[value] += 1
                self._ready.extend(self._waiting.pop(value, ()))
