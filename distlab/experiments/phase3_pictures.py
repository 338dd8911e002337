"""The figures of phase 3's walkthrough; each draws plain data that its caller prints.

Colors are those of `distlab.trace.palette`, and never alone: there is a word, a shape
or a line beside each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from distlab.experiments.phase3 import Backward
from distlab.trace.palette import (
    ALGORITHMS,
    BACKWARD,
    GRADIENTS,
    GRID,
    INK,
    LINK_BUSY,
    METHODS,
    OPTIMIZER_STATE,
    WEIGHTS,
    text_on,
)

LETTERS = {"naive": "n", "ring": "r", "recursive doubling": "d", "hierarchical": "h"}


def draw_crossover(
    sizes: Sequence[int],
    estimates: Mapping[str, Sequence[float]],
    simulated: Mapping[str, Sequence[float]],
) -> None:
    """Seconds against bytes: lines for the estimates, circles for simulated runs."""
    _, axis = plt.subplots(figsize=(6.5, 3.4))
    for name, seconds in estimates.items():
        axis.loglog(sizes, seconds, label=name, color=ALGORITHMS[name])
    for name, seconds in simulated.items():
        axis.loglog(
            sizes[: len(seconds)], seconds, "o", mfc="none", color=ALGORITHMS[name]
        )
    axis.set(xlabel="bytes of the tensor", ylabel="seconds; circles: simulated")
    axis.legend(frameon=False)
    axis.grid(color=GRID)
    plt.show()


def draw_nodes(times: Mapping[str, tuple[float, float]]) -> None:
    """Two bars for each algorithm: its time, and that of the busiest uplink."""
    _, axis = plt.subplots(figsize=(6.5, 2.2))
    for row, (name, (time_s, hot_s)) in enumerate(times.items()):
        axis.barh(row - 0.2, 1e6 * time_s, 0.36, color=ALGORITHMS[name])
        axis.barh(row + 0.2, 1e6 * hot_s, 0.36, color=LINK_BUSY)
    axis.set_yticks(range(len(times)), list(times))
    axis.invert_yaxis()
    axis.set(xlabel="µs; lower bar, indigo: busy time of the busiest uplink")
    plt.show()


def draw_choices(
    counts: Sequence[int], sizes: Sequence[str], picked: Sequence[Sequence[str]]
) -> None:
    """A square for each number of ranks and each size, with the choice's letter."""
    _, axis = plt.subplots(figsize=(7, 0.6 + 0.36 * len(counts)))
    for row, names in enumerate(picked):
        for column, name in enumerate(names):
            corner, color = (column, row), ALGORITHMS[name]
            axis.add_patch(Rectangle(corner, 0.95, 0.9, facecolor=color))
            axis.annotate(
                LETTERS[name],
                (column + 0.47, row + 0.45),
                ha="center",
                va="center",
                color=text_on(color),
            )
    axis.set(xlim=(0, len(sizes)), ylim=(0, len(counts)))
    axis.set_yticks([r + 0.45 for r in range(len(counts))], [f"{n}" for n in counts])
    axis.set_xticks([c + 0.47 for c in range(len(sizes))], list(sizes), size=7)
    axis.set(ylabel="ranks", xlabel="bytes of the tensor")
    axis.legend(
        handles=[
            Patch(color=ALGORITHMS[name], label=f"{letter}: {name}")
            for name, letter in LETTERS.items()
            if any(name in names for names in picked)
        ],
        frameon=False,
        bbox_to_anchor=(1.01, 1),
        loc="upper left",
    )
    axis.set_frame_on(False)
    plt.show()


def draw_lanes(runs: Mapping[str, Backward], backward_s: float) -> None:
    """For each run two lanes: computing above, the buckets on the link below."""
    _, axis = plt.subplots(figsize=(7, 0.8 + 0.7 * len(runs)))
    for row, run in enumerate(runs.values()):
        box = (0, row), 1e3 * backward_s, 0.36
        axis.add_patch(Rectangle(*box, facecolor=BACKWARD, edgecolor="white"))
        for begin, end in run.transfers:
            corner, width = (1e3 * begin, row + 0.4), 1e3 * (end - begin)
            axis.add_patch(
                Rectangle(
                    corner, width, 0.36, facecolor=LINK_BUSY, edgecolor="white", lw=0.4
                )
            )
        axis.annotate(
            f"{1e3 * run.ended_s:.1f} ms", (1e3 * run.ended_s + 0.3, row + 0.5)
        )
    longest = max(run.ended_s for run in runs.values())
    axis.set(xlim=(0, 1.12e3 * longest), ylim=(len(runs), -0.1))
    axis.set(xlabel="ms; above: backward, below: buckets on the link")
    axis.set_yticks([row + 0.4 for row in range(len(runs))], list(runs))
    axis.set_frame_on(False)
    plt.show()


def draw_curves(
    labels: Sequence[str], curves: Mapping[str, Sequence[float]], *, xlabel: str
) -> None:
    """One curve for each name; a thick one below, a thin one with marks on top."""
    _, axis = plt.subplots(figsize=(6.5, 2.6))
    for index, (name, values) in enumerate(curves.items()):
        if index:
            axis.plot(labels, values, "x-", label=name, lw=1.5, color=METHODS[0])
        else:
            axis.plot(labels, values, label=name, lw=6, color=METHODS[1], alpha=0.6)
    axis.set(
        xlabel=xlabel,
        ylabel="µs per step",
        ylim=(0, 1.1 * max(map(max, curves.values()))),
    )
    axis.legend(frameon=False)
    plt.show()


def draw_held(bars: Mapping[str, Mapping[str, int]]) -> None:
    """A bar for each stage, of weights, gradients and state; each part is named."""
    _, axis = plt.subplots(figsize=(6.5, 2.2))
    colors = {"weights": WEIGHTS, "gradients": GRADIENTS, "state": OPTIMIZER_STATE}
    for label, parts in bars.items():
        start = 0.0
        for name, color in colors.items():
            width = parts[name] / 1000
            axis.barh(label, width, left=start, color=color, edgecolor=INK)
            start += width
    axis.legend(
        handles=[Patch(color=c, label=name) for name, c in colors.items()],
        frameon=False,
        bbox_to_anchor=(1.01, 1),
        loc="upper left",
    )
    axis.invert_yaxis()
    axis.set(xlabel="kB on a rank; from the left: weights, gradients, state")
    plt.show()
