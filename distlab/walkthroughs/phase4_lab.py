"""Turn rows of numbers into the figures and tables of phase 4's lab.

`print_table` prints the numbers of a figure. We never rely on color alone, so each
color also has a word, a marker or a hatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from distlab.given.monitoring import Spans
from distlab.given.recovery import RecordedRun
from distlab.trace.palette import (
    BACKWARD,
    CALL,
    FAILURE,
    FORWARD,
    INK,
    METHODS,
    SURFACE,
)
from distlab.walkthroughs.phase4 import Rows, Search
from distlab.walkthroughs.phase4_elastic import Resized
from distlab.walkthroughs.tables import print_table

__all__ = [
    "draw_accuracies",
    "draw_processes",
    "draw_residuals",
    "draw_resized",
    "draw_run",
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
    """Draw a bar per rank with the three parts of its step."""
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
    """Draw each rank's communication in the last step, and mark the hidden ranks."""
    _, axis = plt.subplots(figsize=(6.5, 2.4))
    waits = [ms[2] for ms in found.ms]
    axis.bar(range(len(waits)), waits, color=CALL, edgecolor=INK, linewidth=0.4)
    for rank in found.faults["stragglers"]:
        place = (rank, max(waits) * 0.5)
        axis.annotate(f"rank {rank}", place, ha="center", rotation=90)
    axis.set(xlabel="rank", ylabel="communication, ms")
    plt.show()


def draw_traces(traces: Mapping[str, Spans]) -> None:
    """Draw two lanes for each trace, from the start of its first operator."""
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
    """Draw a line for each element, with its residual after each step."""
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
    """Draw a line over the epochs for each way to train."""
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


def draw_run(name: str) -> None:
    """Draw a lane for each rank of a recorded run, with heartbeats as ticks."""
    run = RecordedRun.read(name)
    end_s = run.messages[-1][0]
    fills = {"compute": FORWARD, "wait": CALL, "save": BACKWARD}
    ranks = sorted({message[1] for message in run.messages})
    _, axis = plt.subplots(figsize=(6.5, 0.8 + 0.6 * len(ranks)))
    for rank in ranks:
        own = [message for message in run.messages if message[1] == rank]
        beats = [time_s for time_s, _, what, _ in own if what == "beat"]
        axis.plot(beats, [-rank + 0.42] * len(beats), "|", color=INK, markersize=3)
        marks = [m for m in own if m[2] in (*fills, "ended", "started")]
        ends = [m[0] for m in marks[1:]] + [end_s]
        for (time_s, _, what, _), until_s in zip(marks, ends, strict=True):
            if what in fills:
                bar = [(time_s, until_s - time_s)]
                axis.broken_barh(bar, (-rank - 0.3, 0.6), color=fills[what])
    for fault_s, rank, what in run.faults:
        axis.axvline(fault_s, color=FAILURE, linestyle="--")
        axis.annotate(f" rank {rank}: {what}", (fault_s, 0.6), color=FAILURE)
    axis.set_yticks([-rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    axis.set(xlabel="s   (blue: compute, violet: wait, orange: save)", ylim=(-2.6, 1))
    plt.show()


def draw_processes(bars: Sequence[tuple[int, float, float, str, int]]) -> None:
    """Draw a lane for each process, with its role and the generation of its rank."""
    processes = sorted({bar[0] for bar in bars})
    _, axis = plt.subplots(figsize=(6.5, 0.8 + 0.4 * len(processes)))
    for process, start_s, end_s, what, generation in bars:
        lane = -processes.index(process)
        color = (SURFACE, FORWARD, BACKWARD)[generation and 1 + generation % 2]
        axis.barh(
            lane,
            end_s - start_s,
            left=start_s,
            height=0.7,
            color=color,
            edgecolor=INK,
            linewidth=0.6,
        )
        if end_s - start_s > 0.8:
            middle = (start_s + end_s) / 2
            axis.annotate(what, (middle, lane), ha="center", va="center", fontsize=8)
    names = [f"process {process}" for process in processes]
    axis.set_yticks([-k for k in range(len(processes))], names)
    axis.set(xlabel="s")
    plt.show()


def draw_resized(run: Resized) -> None:
    """Draw the loss of each step, and below it the samples of each rank."""
    _, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6.5, 4.2))
    steps = range(len(run.losses))
    above.plot(run.fixed_losses, "-", color=METHODS[0], label="4 ranks, fixed")
    above.plot(run.losses, "x", color=METHODS[1], label="4, 2 and 3 ranks")
    above.set(ylabel="loss")
    above.legend(frameon=False)
    floor = [0.0 for _ in steps]
    for rank in range(max(map(len, run.samples))):
        shards = [len(step[rank]) if rank < len(step) else 0 for step in run.samples]
        below.bar(
            steps,
            shards,
            bottom=floor,
            color=METHODS[rank % len(METHODS)],
            hatch=("", "//", "..", "xx")[rank % 4],
            edgecolor="black",
            linewidth=0.4,
            label=f"rank {rank}",
        )
        floor = [under + shard for under, shard in zip(floor, shards, strict=True)]
    below.set(xlabel="step", ylabel="samples of each rank")
    below.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()
