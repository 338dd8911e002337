"""Ports with measured times, which depend on what both ends of a message do meanwhile.

A message doesn't have a single duration. Before its bytes leave, the receiver has to
ask for them (see the TCP transport), and whether that happens in time depends on the
pattern:

    one way          0 ──▶ 1  0 ──▶ 1    the receiver asks once the last one is in:
                                         the sender waits for that
    back and forth   0 ──▶ 1  0 ◀── 1    it asked when its own had left: in time
    both ways        0 ◀─▶ 1  0 ◀─▶ 1    both ask, and both copy, at the same time

We tell the first two apart by the receiver's last message. If both ends exchange, the
program has to say so (`exchange`), which it does if you run it with
`charge.run_charged`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from distlab.sim.net.links import PS, Cost, Ports

Seconds = Callable[[float], float]
"""Returns a message's seconds, given its bytes."""


class _Passage(NamedTuple):
    """The last message of a rank: its direction, and when it was finished."""

    came_in: bool
    end_ps: int


class MeasuredPorts(Ports):
    """`Ports` with the times of `cost`, which are one-way, and two more patterns."""

    def __init__(
        self,
        cost: Cost,
        back_and_forth_s: Seconds,
        both_ways_s: Seconds,
        world_size: int,
    ) -> None:
        super().__init__(cost, world_size)
        self._back_and_forth_s, self._both_ways_s = back_and_forth_s, both_ways_s
        self._last: list[_Passage | None] = [None] * world_size
        self._exchanged: list[float | None] = [None] * world_size

    def exchange(self, rank: int, num_bytes: float | None) -> None:
        """Note that a rank sends and receives at once; None ends this.

        `num_bytes` is the size of the smaller of its two messages.
        """
        self._exchanged[rank] = num_bytes

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """Implement `Wires.message`."""
        start = max(now_ps, self._out_free_ps[src], self._in_free_ps[dst])
        whole, latency = self._whole_ps(src, dst, num_bytes, start)
        busy = round(max(0.0, whole - latency))
        end = start + round(max(whole, 0.0))
        self._out_free_ps[src] = self._in_free_ps[dst] = start + busy
        self._out_busy_ps[src] += busy
        self._in_busy_ps[dst] += busy
        self._last[src], self._last[dst] = _Passage(False, end), _Passage(True, end)
        return start, end

    def _whole_ps(
        self, src: int, dst: int, num_bytes: int, start: int
    ) -> tuple[float, float]:
        """Return the message's picoseconds, and how many of them keep no end busy."""
        bytes_ps, latency = self._cost(num_bytes)
        one_way = bytes_ps + latency
        mine, theirs = self._exchanged[src], self._exchanged[dst]
        if mine is not None and theirs is not None:
            common = min(num_bytes, mine, theirs)
            more = one_way - sum(self._cost(common))
            return self._both_ways_s(common) * PS + more, latency
        last = self._last[dst]
        if last is None or (last.came_in and start - last.end_ps < latency):
            return one_way, latency  # to ask takes no longer than the shortest message
        return self._back_and_forth_s(num_bytes) * PS, latency
