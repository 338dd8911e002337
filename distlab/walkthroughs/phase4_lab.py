"""The figures and tables of phase 4's lab: rows of numbers in, a figure out.

`print_table` prints the same numbers. Colors never stand alone: there is a word, a
marker or a hatch beside each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from distlab.given.monitoring import Spans
from distlab.trace.palette import BACKWARD, CALL, FORWARD, INK, METHODS, SURFACE
from distlab.walkthroughs.phase4 import Rows, Search
from distlab.walkthroughs.tables import print_table

__all__ = [
    "draw_accuracies",
    "draw_residuals",
    "draw_shares",
    "draw_traces",
    "draw_waits",
    "print_table",
]

_FILLS = {"data": SURFACE, "compute": FORWARD, "communication": CALL}
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "x")
_HATCHES = {"data": "", "compute": "", "communication": "///"}


def draw_shares(rows: Rows) -> None:
    """A bar per rank, of the three parts of its step."""
    _, axis = plt.subplots(figsize=(6.5, 0.9 + 0.32 * len(rows)))
    for place, row in enumerate(rows.values()):
        left = 0.0
        for part, percent in row.items():
            axis.barh(
                place,
                percent,
                left=left,
                height=0.7,
                color=_FILLS[part],
                hatch=_HATCHES[part],
                edgecolor="black",
                linewidth=0.6,
                label=part if not place else None,
            )
            left += percent
    axis.set_yticks(range(len(rows)), [f"rank {rank}" for rank in rows])
    axis.invert_yaxis()
    axis.set(xlabel="% of the rank's step", xlim=(0, 100))
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()


def draw_waits(found: Search) -> None:
    """Communication of each rank in the last step; the hidden ranks are marked."""
    _, axis = plt.subplots(figsize=(6.5, 2.4))
    waits = [ms[2] for ms in found.ms]
    axis.bar(range(len(waits)), waits, color=CALL, edgecolor=INK, linewidth=0.4)
    for rank in found.faults["stragglers"]:
        place = (rank, max(waits) * 0.5)
        axis.annotate(f"rank {rank}", place, ha="center", rotation=90)
    axis.set(xlabel="rank", ylabel="communication, ms")
    plt.show()


def draw_traces(traces: Mapping[str, Spans]) -> None:
    """Two lanes for each trace, from the start of its first operator."""
    _, axes = plt.subplots(len(traces), 1, figsize=(6.5, 1.1 * len(traces)))
    for axis, (name, spans) in zip(axes, traces.items(), strict=True):
        for lane, (what, color) in enumerate((("compute", BACKWARD), ("comm.", CALL))):
            own = spans.compute if what == "compute" else spans.communication
            bars = [(start / 1000, (end - start) / 1000) for start, end in own]
            axis.broken_barh(bars, (-lane - 0.4, 0.8), color=color)
        axis.set_yticks([0, -1], ["compute", "comm."])
        axis.set_title(f"{name}, ms", loc="left", fontsize=9)
    plt.tight_layout()
    plt.show()


def draw_residuals(kept: Sequence[Sequence[float]], gradients: Sequence[float]) -> None:
    """A line for each element: what the rank keeps of it, after each step."""
    _, axis = plt.subplots(figsize=(6.5, 2.6))
    steps = range(1, len(kept) + 1)
    for number, gradient in enumerate(gradients):
        axis.plot(
            steps,
            [residuals[number] for residuals in kept],
            _LINES[number % len(_LINES)],
            color=METHODS[number % len(METHODS)],
            label=f"gradient {gradient:g}",
        )
    axis.set(xlabel="step", ylabel="residual")
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()


def draw_accuracies(rows: Mapping[str, Mapping[str, float]]) -> None:
    """A line for each way to train, over the epochs."""
    _, axis = plt.subplots(figsize=(6.5, 2.6))
    for number, name in enumerate(next(iter(rows.values()))):
        axis.plot(
            [int(epoch) for epoch in rows],
            [row[name] for row in rows.values()],
            marker=_MARKERS[number % len(_MARKERS)],
            color=METHODS[number % len(METHODS)],
            label=name,
        )
    axis.set(xlabel="epoch", ylabel="held-out digits, %")
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()
