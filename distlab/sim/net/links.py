"""Compute how long a message takes: the networks for a simulated run.

A network is a description (`AlphaBeta`, frozen, shared), and its `wires` method creates
the state for one run. You can use any object that has the two methods of `Wires`.

    AlphaBeta   a latency and a bandwidth, the same for every pair (this file)
    LogGP       the same, with what sender, receiver and wire do each (loggp.py)
    Piecewise   a table of measured times (piecewise.py)
    Fabric      nodes, NICs and switches that messages share (fabric.py)

Source: R. Hockney, "The communication challenge for MPP" (1994), for alpha and beta.
Symbols: alpha_s = alpha, seconds per message; bytes_per_s = B = 1 / beta, where beta is
seconds per byte; n ranks; S bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

PS = 1_000_000_000_000
"""Picoseconds in a second. Times are integers in picoseconds, so sums are exact."""


def picoseconds(seconds: float) -> int:
    """Round seconds to an integer number of picoseconds."""
    return round(seconds * PS)


class Wires(Protocol):
    """The state of one network during one run."""

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """Reserve a message's way; return when it starts and when it is complete."""

    def collective(
        self, op: str, n: int, num_bytes: int, members: Sequence[int] = ()
    ) -> int:
        """Return the picoseconds that a library collective of n ranks takes.

        `members` are the n ranks of the world, in case the time depends on them.
        """


@runtime_checkable
class Metered(Protocol):
    """Wires that can report afterwards how busy each link was."""

    def usage(self) -> dict[str, int]:
        """Return the picoseconds for which each link that was used was busy."""


class Receive(Protocol):
    """The receiver's end of a message, as seen by `Ports.messages`."""

    @property
    def channel(self) -> Any:
        """Where it comes from, `src`, and goes to, `dst`; always the same object."""

    @property
    def other(self) -> Any:
        """The sender's end, which has the `num_bytes`."""


class Network(Protocol):
    """The interface of a network, which `run` takes as its `net`."""

    def wires(self, world_size: int) -> Wires:
        """Return the state of a network on which no message is in flight yet."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Every pair has an equal link: S bytes take alpha_s + S / bytes_per_s seconds.

    Each rank has one link out and one link in. Messages that share a link follow each
    other, byte after byte, while their latencies overlap. The defaults are typical of a
    good data center: 10 µs, 100 Gbit/s.

    Raises:
        ValueError: the latency is negative, or the speed isn't above zero.
    """

    alpha_s: float = 10e-6
    bytes_per_s: float = 12.5e9

    def __post_init__(self) -> None:
        require_duration("alpha_s", self.alpha_s)
        require_speed("bytes_per_s", self.bytes_per_s)

    def wires(self, world_size: int) -> Wires:
        """Return the state of a network on which no message is in flight yet."""
        alpha_ps, ps_per_byte = picoseconds(self.alpha_s), PS / self.bytes_per_s

        def cost(num_bytes: float) -> tuple[float, float]:
            bytes_ps = num_bytes * ps_per_byte
            return bytes_ps, alpha_ps

        return Ports(cost, world_size)

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds for one message on an empty network."""
        return self.alpha_s + num_bytes / self.bytes_per_s


Cost = Callable[[float], tuple[float, float]]
"""Returns the cost of a message with that many bytes: the picoseconds for which it
occupies the sender's outgoing and the receiver's incoming link, and the picoseconds
from then until it arrives."""


class Round:
    """The channels of messages that started at the same instant.

    `until_ps` is when all the links that these channels use are free. `busy_ps` is how
    long each of the links was busy when the round was repeated. We haven't added that
    time to the totals of the links yet.
    """

    def __init__(self, channels: set[Any], until_ps: int) -> None:
        self.channels, self.until_ps, self.busy_ps = channels, until_ps, 0

    @functools.cached_property
    def share_no_link(self) -> bool:
        """True if each of the messages has both links for itself."""
        sources = {channel.src for channel in self.channels}
        targets = {channel.dst for channel in self.channels}
        return len(sources) == len(targets) == len(self.channels)


class Ports:
    """Tracks when each rank's links, out and in, are free again; for equal links."""

    def __init__(self, cost: Cost, world_size: int) -> None:
        self._cost = cost
        self._costs: dict[int, tuple[int, int]] = {}
        self._out_free_ps = [0] * world_size
        self._in_free_ps = [0] * world_size
        self._out_busy_ps = [0] * world_size
        self._in_busy_ps = [0] * world_size
        self._round: Round | None = None  # the last one, if nothing came after it

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """Implement `Wires.message`."""
        if self._round:
            self._settle()
        busy, rest = self._costs.get(num_bytes) or self._cost_of(num_bytes)
        out_free, in_free = self._out_free_ps, self._in_free_ps
        start = now_ps
        if out_free[src] > start:
            start = out_free[src]
        if in_free[dst] > start:
            start = in_free[dst]
        free = out_free[src] = in_free[dst] = start + busy
        self._out_busy_ps[src] += busy
        self._in_busy_ps[dst] += busy
        return start, free + rest

    def messages(self, receives: list[Receive], now_ps: int) -> list[int]:
        """Do what `message` does for each receive; return the times of completion.

        In a ring of 1,024 ranks the same 1,024 pairs exchange a message 2,046 times. If
        no message has to wait, we needn't check each link every time.
        """
        channels = {receive.channel for receive in receives}
        last = self._round
        if last and channels == last.channels and len(channels) == len(receives):
            sizes = {receive.other.num_bytes for receive in receives}
            if last.share_no_link and len(sizes) == 1 and now_ps >= last.until_ps:
                busy, rest = self._cost_of(sizes.pop())
                last.until_ps = now_ps + busy
                last.busy_ps += busy
                return [now_ps + busy + rest] * len(receives)
        self._settle()
        message = self.message
        ends = [
            message(r.channel.src, r.channel.dst, r.other.num_bytes, now_ps)[1]
            for r in receives
        ]
        self._round = Round(channels, max(ends))
        return ends

    def _settle(self) -> None:
        """Add the time of repeated rounds to each link, and forget the round."""
        last, self._round = self._round, None
        if last and last.busy_ps:
            for channel in last.channels:
                src, dst = channel.src, channel.dst
                self._out_free_ps[src] = self._in_free_ps[dst] = last.until_ps
                self._out_busy_ps[src] += last.busy_ps
                self._in_busy_ps[dst] += last.busy_ps

    def collective(
        self, op: str, n: int, num_bytes: int, members: Sequence[int] = ()
    ) -> int:
        """Implement `Wires.collective`; all hops are alike."""
        return collective_ps(op, n, num_bytes, lambda size: sum(self._cost(size)))

    def usage(self) -> dict[str, int]:
        """Implement `Metered.usage`."""
        self._settle()
        busy = {"out": self._out_busy_ps, "in": self._in_busy_ps}
        return {
            f"rank{rank}.{way}": ps
            for way, ranks in busy.items()
            for rank, ps in enumerate(ranks)
            if ps
        }

    def alone(self, num_bytes: int) -> tuple[int, int]:
        """Return a lone message's picoseconds, and how many keep its ends busy."""
        busy, rest = self._cost_of(num_bytes)
        return busy + rest, busy

    def _cost_of(self, num_bytes: int) -> tuple[int, int]:
        busy, rest = self._cost(num_bytes)
        self._costs[num_bytes] = round(busy), round(rest)
        return self._costs[num_bytes]


def collective_ps(
    op: str, n: int, num_bytes: int, hop_ps: Callable[[float], float]
) -> int:
    """Return the picoseconds of the bandwidth-optimal algorithm for `op` on `n` ranks.

    `num_bytes` is the size of each rank's input, and `hop_ps(size)` is the time of one
    message of that size.
    """
    depth = math.ceil(math.log2(n))  # hops of a tree to the furthest rank
    steps, size = {
        "all_reduce": (2 * (n - 1), num_bytes / n),
        "reduce_scatter": (n - 1, num_bytes / n),
        "all_to_all": (n - 1, num_bytes / n),
        "all_gather": (n - 1, num_bytes),
        "broadcast": (depth, num_bytes),
        "reduce": (depth, num_bytes),
    }.get(op, (depth, 0))
    return round(steps * hop_ps(size))


def require_duration(name: str, seconds: float) -> None:
    """Require a time that is finite and not negative.

    Raises:
        ValueError: it isn't; the message has its name.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} is {seconds}, but it must be finite and at least 0")


def require_speed(name: str, per_s: float) -> None:
    """Require a speed above zero, which may be infinite.

    Raises:
        ValueError: it isn't; the message has its name.
    """
    if not per_s > 0:
        raise ValueError(f"{name} is {per_s}: it must be above 0")
