"""A learner's service, played in virtual time: message by message, or under scripts.

    history = played_by_hand(make, [Ask(0, push), Ask(1, push), Restart()], codec)
    record = play(make, program, 3, script, codec)            # one script of faults
    record = play_scripts(make, program, 3, scripts, codec, flaw=flaw)

All of it runs in the rank, on what the learner wrote; what comes back is plain data. A
history has a row for every call of `handle`, in order, as the service saw it: see
`histories`, which judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.comm import Factory, Pending, Reacts, Request, Service, ServiceContext
from distlab.comm.services import PeerGone, Started, Tick
from distlab.grading.kit.histories import CRASHED, GONE, RESTARTED
from distlab.runner.autopsy import NOBODY
from distlab.sim import AlphaBeta, Faults, SimDisk, run, script_text, shrink
from distlab.sim.faults import STORE
from distlab.sim.scripts import faults_of

SERVICE = "server"
"""By this name clients call the service, and scripts of faults name it."""
NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
_WALL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Codec:
    """How messages become plain data: what is shown, recorded and played to a model.

    With `state` a row also has what that gives of the service after the message.
    """

    request: Callable[[bytes], Any]
    reply: Callable[[bytes], Any]
    state: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Ask:
    """By hand: this message of this rank."""

    peer: int
    message: bytes


@dataclass(frozen=True)
class Gone:
    """By hand: this rank's process has ended."""

    peer: int


@dataclass(frozen=True)
class Restart:
    """By hand: the service's process dies; it is made again on what the disk has."""


@dataclass(frozen=True)
class At:
    """By hand: it is so late now; a service that has `on` gets a Tick."""

    now_s: float


Step = Ask | Gone | Restart | At


# ── in the rank ─────────────────────────────────────────────────────────────────────


class _Log:
    """The rows of all lives of one service, and the first error of its code."""

    def __init__(self, make: Factory, codec: Codec) -> None:
        self.rows: list[list[Any]] = []
        self.error: Exception | None = None
        self._make, self._codec, self._lives = make, codec, 0

    def factory(self, context: ServiceContext) -> Service:
        """Makes the service, and who watches it."""
        if self._lives:
            self.rows.append([context.clock.now_s(), NOBODY, RESTARTED, None])
        self._lives += 1
        try:
            service = self._make(context)
        except Exception as error:
            self.error = self.error or error
            raise
        watched = _WatchedEvents if isinstance(service, Reacts) else _Watched
        return watched(self, service, context)

    def read(self, which: Callable[[bytes], Any], data: Any) -> Any:
        return which(data) if isinstance(data, bytes) else data


class _Watched:
    """Notes what a service is offered and what it replies."""

    def __init__(self, log: _Log, service: Any, context: ServiceContext) -> None:
        self._log, self._service, self._clock = log, service, context.clock

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """See `Handle`."""
        codec = self._log._codec
        row = [self._clock.now_s(), peer, codec.request(message), CRASHED]
        self._log.rows.append(row)
        try:
            reply: bytes | None = self._service.handle(peer, message)
            row[3] = self._log.read(codec.reply, reply)
            row += [codec.state(self._service)] if codec.state else []
        except Exception as error:
            self._log.error = self._log.error or error
            raise
        return reply


class _WatchedEvents(_Watched):
    """The same for a service that has `on`."""

    def on(self, event: object, now_s: float) -> Sequence[object]:
        """See `Reacts.on`."""
        if isinstance(event, PeerGone):
            self._log.rows.append([now_s, event.peer, GONE, None])
        try:
            actions: Sequence[object] = self._service.on(event, now_s)
        except Exception as error:
            self._log.error = self._log.error or error
            raise
        return actions


class _Hands:
    """The clock of a service that is played by hand."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        raise RuntimeError("a service answers at once: it cannot wait")


def played_by_hand(
    make: Factory, steps: Iterable[Step], codec: Codec, disk: SimDisk | None = None
) -> list[list[Any]]:
    """The history of a service that meets these steps, with nothing between them.

    Messages that are not answered yet are offered again, as everywhere.

    Raises:
        Exception: what the service raises.
    """
    log, clock = _Log(make, codec), _Hands()
    there, number = disk or SimDisk(), 0

    def start() -> tuple[Any, Pending]:
        service = log.factory(ServiceContext(disk=there, clock=clock))
        tell(service, Started())
        return service, Pending(service.handle)

    def tell(service: Any, event: object) -> None:
        if isinstance(service, Reacts):
            service.on(event, clock.time_s)

    service, pending = start()
    for step in steps:
        if isinstance(step, Ask):
            number += 1
            request = Request(peer=step.peer, number=number, message=step.message)
            pending.take(request, clock.time_s)
        elif isinstance(step, Restart):
            there = SimDisk(there.files)
            service, pending = start()
        else:
            if isinstance(step, Gone):
                pending.forget(step.peer)
            else:
                clock.time_s = step.now_s
            tell(service, PeerGone(step.peer) if isinstance(step, Gone) else Tick())
            pending.offer_again(clock.time_s)
        if log.error:
            raise log.error
    return log.rows


def play_service(
    make: Factory,
    program: Callable[..., Any],
    ranks: int,
    script: Faults,
    codec: Codec,
) -> dict[str, Any]:
    """One run of `program(context)` on `ranks` clients of the service, as plain data.

    Raises:
        Exception: what the service raises.
    """
    log = _Log(make, codec)
    done = run(
        program,
        ranks,
        net=NET,
        faults=script,
        services={SERVICE: log.factory},
        journal=False,
        trace=False,
        wall_limit_s=_WALL_LIMIT_S,
    )
    if log.error:
        raise log.error
    return {
        "script": script_text(script),
        "faults": [_words(fault, script.seed) for fault in faults_of(script)],
        "struck": [[one.at_ps / 1e12, str(one)] for one in done.struck],
        "outcome": done.outcome,
        "explanation": done.explanation,
        "values": done.values,
        "history": log.rows,
    }


def play_scripts(
    make: Factory,
    program: Callable[..., Any],
    ranks: int,
    scripts: Iterable[Faults],
    codec: Codec,
    *,
    flaw: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """The record of the first script in which `flaw` finds something, made short.

    Without one that of the last script; `num_scripts` says how many were played.
    """
    record: dict[str, Any] = {}
    for count, script in enumerate(scripts, 1):
        record = play_service(make, program, ranks, script, codec) | {
            "num_scripts": count
        }
        if flaw(record):

            def fails(shorter: Faults) -> bool:
                return bool(flaw(play_service(make, program, ranks, shorter, codec)))

            least = shrink(script, fails, most_runs=60)
            return play_service(make, program, ranks, least, codec) | {
                "num_scripts": count
            }
    return record


def _words(fault: Any, seed: int) -> str:
    """A fault as a clause of a sentence."""
    names = " and ".join(_name(node) for node in fault.nodes)
    times = [f"{number:g} s" for number in fault.numbers]
    match fault.kind:
        case "loss":
            return f"{fault.numbers[0]:.0%} of the messages were lost"
        case "duplicate":
            return f"{fault.numbers[0]:.0%} of the messages arrived twice"
        case "straggler":
            return f"{names} was {fault.numbers[0]:g} times slower"
        case "late":
            return f"{names} started at {times[0]}"
        case "kill":
            return f"{names} was killed at {times[0]}"
        case "freeze":
            return f"{names} was frozen from {times[0]} to {times[1]}"
        case "partition":
            return f"{names} could not be reached from {times[0]} to {times[1]}"
        case "torn":
            return f"{names} was killed in a write after {times[0]} and restarted"
    return f"{names} was killed at {times[0]} and restarted at {times[1]}"


def _name(node: int | str) -> str:
    if isinstance(node, int):
        return f"rank {node}"
    return "the store" if node == STORE else f"the {node}"
