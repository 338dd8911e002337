"""How busy the ways of data were, and what bandwidth that came to.

Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md, for the bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distlab.trace.model import Column, Link, Trace

if TYPE_CHECKING:
    from distlab.runner import Run

PARTS = 512  # equal parts of a run's time

_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def shares(
    trace: Trace, groups: Column, starts: Column, ends: Column, parts: int = PARTS
) -> NDArray[np.float64]:
    """What share of each part of the run the intervals of each rank cover.

    `groups` has the rank of each interval. Shape [world_size, parts]; intervals that
    overlap count once each, up to 1 in all.
    """
    wide = max(trace.end_ps, 1) / parts
    first = np.minimum((starts / wide).astype(np.int64), parts - 1)
    last = np.minimum((ends / wide).astype(np.int64), parts - 1)
    inside = first == last
    size = trace.world_size * parts
    cells = np.zeros(size)
    at = groups * parts
    head = np.where(inside, ends - starts, (first + 1) * wide - starts)
    tail = np.where(inside, 0, ends - last * wide)
    cells += np.bincount(at + first, head, size)
    cells += np.bincount(at + last, tail, size)
    # Parts that an interval covers whole: +1 where they begin, -1 where they end.
    steps = np.zeros(trace.world_size * (parts + 1))
    beyond = groups * (parts + 1)
    many = ~inside
    steps += np.bincount((beyond + first + 1)[many], minlength=len(steps))
    steps -= np.bincount((beyond + last)[many], minlength=len(steps))
    whole = steps.reshape(trace.world_size, parts + 1).cumsum(axis=1)[:, :parts]
    covered = cells.reshape(trace.world_size, parts) / wide + whole
    return np.clip(covered, 0.0, 1.0)  # type: ignore[no-any-return,unused-ignore]


def ways(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How busy each rank's link out was in each part of the run, and its link in.

    A message uses both until it has arrived; its latency counts.
    """
    m = trace.messages
    begin, end = m["start_ps"], m["end_ps"]
    return shares(trace, m["src"], begin, end), shares(trace, m["dst"], begin, end)


def links_of(trace: Trace) -> tuple[Link, ...]:
    """The links of the network; where they are not known, each rank's links out and in.

    Of a link of the network only the share of the whole run is known, so that `busy`
    has one part; the ways have PARTS.
    """
    if trace.links:
        whole = max(trace.end_ps, 1)
        return tuple(
            Link(name=name, busy=np.array([busy_ps / whole]))
            for name, busy_ps in trace.links.items()
        )
    return tuple(
        Link(name=f"rank{rank}.{way}", busy=busy[rank])
        for way, busy in zip(("out", "in"), ways(trace), strict=True)
        for rank in range(trace.world_size)
    )


def utilisation(run: Run) -> tuple[Link, ...]:
    """The links of a run, the busiest one first."""
    from distlab.trace.journals import trace_of

    return tuple(sorted(links_of(trace_of(run)), key=lambda link: -link.mean))


def bus_bandwidth(run: Run, num_bytes: int, op: str = "all_reduce") -> float:
    """Bytes per second that a link must have carried for the collective to end so soon.

    `num_bytes` is the size S of each rank's tensor (of the whole result, for gather and
    scatter), n the number of ranks. In every all-reduce the ranks send 2(n-1)/n S on
    average, so the busiest rank sends at least that much; so this figure, unlike S / t,
    can be compared with the bandwidth of a link for any n.

    Raises:
        ValueError: an operation for which no such figure is defined, or an empty run.
    """
    if op not in _BUS_FACTORS:
        known = ", ".join(_BUS_FACTORS)
        raise ValueError(f"no bus bandwidth is defined for {op}: choose one of {known}")
    if run.seconds <= 0:
        raise ValueError("the run took no time: there is no bandwidth to speak of")
    return float(num_bytes * _BUS_FACTORS[op](run.world_size) / run.seconds)
