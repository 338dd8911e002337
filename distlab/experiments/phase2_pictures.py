"""The figures of phase 2's walkthrough; each draws plain data that its caller prints.

Colors are those of `distlab.trace.palette`, and never alone: there is a word, a shape
or a thickness beside each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from distlab.experiments.phase2 import Played
from distlab.trace.palette import (
    ACTIVATIONS,
    BACKWARD,
    COMPLETE,
    FAILURE,
    FORWARD,
    GRADIENTS,
    GRID,
    INK,
    LINK_BUSY,
    METHODS,
    MUTED,
    NEUTRAL,
    OPTIMIZER_STATE,
    RANK_COLORS,
    WEIGHTS,
    text_on,
)

_KINDS = {"F": FORWARD, "B": BACKWARD}
_PARTS = {
    "weights": WEIGHTS,
    "gradients": GRADIENTS,
    "Adam's state": OPTIMIZER_STATE,
    "optimizer state": OPTIMIZER_STATE,
    "activations": ACTIVATIONS,
}
_OTHERS = (NEUTRAL, *METHODS)  # the kinds of layers


def draw_stacked(
    bars: Mapping[str, Mapping[str, float]], *, xlabel: str, named: bool = False
) -> None:
    """One bar for each label, of the parts that follow each other.

    With `named` each part has its name in it, and its color is that of its first word.
    """
    _, axis = plt.subplots(figsize=(7, 0.9 + 0.42 * len(bars)))
    colors: dict[str, str] = {}
    for label, parts in bars.items():
        start = 0.0
        for part, value in parts.items():
            kind = part.split()[0] if named else part
            legend = None if kind in colors else kind
            other = _OTHERS[len(colors) % len(_OTHERS)]
            color = colors.setdefault(kind, _PARTS.get(kind, other))
            [bar] = axis.barh(label, value, left=start, label=legend)
            bar.set(facecolor=color, edgecolor="white")
            if named and value:
                middle = start + value / 2, label
                axis.annotate(
                    part,
                    middle,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=text_on(color),
                )
            start += value
    axis.invert_yaxis()
    axis.set(xlabel=xlabel)
    if not named:
        axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()


def draw_panels(
    counts: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    xlabel: str,
) -> None:
    """Beside each other, one picture for each title; a line for each label in it."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 2.8))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for index, (label, values) in enumerate(lines.items()):
            color, style = METHODS[index % 2], ("o-", "s--")[index % 2]
            axis.plot(counts, values, style, color=color, label=label)
        axis.set(title=title, xlabel=xlabel, ylim=(0, None))
        axis.set_xticks(counts)
        if len(lines) > 1:
            axis.legend(frameon=False)
        axis.grid(color=GRID)
    figure.tight_layout()
    plt.show()


def draw_sawtooth(
    histories: Mapping[str, tuple[Sequence[float], int]], *, ylabel: str
) -> None:
    """What is kept, change after change; dashed, where backward begins."""
    figure, axes = plt.subplots(
        1, len(histories), figsize=(4 * len(histories), 2.8), sharey=True
    )
    for axis, (label, (history, turn)) in zip(axes, histories.items(), strict=True):
        axis.fill_between(range(len(history)), history, color=ACTIVATIONS, step="post")
        axis.axvline(turn - 0.5, color=INK, ls="--", lw=1)
        axis.set(title=label, xlabel="saved and freed tensors, in order")
        axis.annotate(" backward →", (turn, 0.93), xycoords=("data", "axes fraction"))
    axes[0].set(ylabel=ylabel)
    top = max(max(history) for history, _ in histories.values())
    axes[0].set_ylim(0, 1.2 * top)
    figure.tight_layout()
    plt.show()


def draw_curves(
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    doubling: bool = False,
) -> None:
    """One line per label; the later ones are drawn thinner, on top.

    With `doubling`, every x of `xs` is twice the one before and as far from it.
    """
    _, axis = plt.subplots(figsize=(6.5, 3))
    for index, (label, values) in enumerate(curves.items()):
        style = ("-", "o--", "^:")[index % 3]
        width, color = max(1.5, 7 - 3 * index), METHODS[index % len(METHODS)]
        [line] = axis.plot(xs, values, style, label=label, lw=width, color=color, ms=4)
        line.set_alpha(1.0 if index else 0.4)
    if doubling:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(xs), [f"{x:g}" for x in xs])
        axis.minorticks_off()
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.legend(frameon=False)
    axis.grid(color=GRID)
    plt.show()


def draw_staircase(scales: Sequence[float], skipped: Sequence[int]) -> None:
    """The loss scale step by step; a cross where no rank stepped."""
    _, axis = plt.subplots(figsize=(6.5, 2.8))
    axis.step(range(len(scales)), scales, where="mid", color=INK, lw=2)
    axis.plot(range(len(scales)), scales, "o", color=COMPLETE, ms=5, label="all step")
    axis.plot(
        skipped,
        [scales[s] for s in skipped],
        "X",
        color=FAILURE,
        ms=11,
        label="all skip",
    )
    axis.set_yscale("log", base=2)
    heights = sorted(set(scales))
    axis.set_yticks(heights, [f"{height:,.0f}" for height in heights])
    axis.minorticks_off()
    axis.set(xlabel="step", ylabel="loss scale")
    axis.set_xticks(range(len(scales)))
    axis.legend(frameon=False, loc="upper left")
    axis.grid(color=GRID)
    plt.show()


def draw_schedules(plays: Mapping[str, Played], *, counter: int | None = None) -> None:
    """What each rank does when; below it, how much the rank `counter` keeps."""
    rows = len(plays) * (1 if counter is None else 2)
    heights = [1.6, 1.0][: 1 if counter is None else 2] * len(plays)
    figure, axes = plt.subplots(
        rows, 1, figsize=(9, sum(heights) + 0.4), height_ratios=heights, squeeze=False
    )
    most = 0 if counter is None else max(max(p.live(counter)) for p in plays.values())
    for index, (title, play) in enumerate(plays.items()):
        place = index if counter is None else 2 * index
        _schedule(axes[place][0], title, play)
        if counter is not None:
            _counter(axes[place + 1][0], play.live(counter), counter, most)
    figure.tight_layout()
    plt.show()


def _schedule(axis: Axes, title: str, play: Played) -> None:
    for rank, row in enumerate(play.rows):
        for place, entry in enumerate(row):
            if entry == "." or (place and row[place - 1] == entry):
                continue
            length = next(
                (i for i, e in enumerate(row[place:]) if e != entry), len(row) - place
            )
            color = _KINDS[entry[0]]
            axis.add_patch(
                Rectangle((place, rank), length, 0.9, facecolor=color, edgecolor=INK)
            )
            middle = place + length / 2, rank + 0.47
            axis.annotate(entry, middle, ha="center", va="center", fontsize=8)
    axis.set(title=title, xlim=(0, len(play.rows[0])), ylim=(len(play.rows), 0))
    axis.set_yticks([r + 0.45 for r in range(len(play.rows))])
    axis.set_yticklabels([f"rank {r}" for r in range(len(play.rows))])
    axis.set_xticks([])
    axis.set_xlabel("time →  (gray: the pipeline bubble)")
    axis.set_facecolor(NEUTRAL)


def _counter(axis: Axes, live: Sequence[int], rank: int, most: int) -> None:
    """Microbatches that a rank keeps, as steps under its schedule."""
    axis.fill_between(range(len(live) + 1), [*live, 0], step="post", color=ACTIVATIONS)
    for place, count in enumerate(live):
        at = place + 0.5, count + 0.15
        axis.annotate(str(count), at, ha="center", va="bottom", fontsize=7)
    axis.set(xlim=(0, len(live)), ylim=(0, 1.35 * most), xticks=[], yticks=[])
    axis.set_ylabel(
        f"microbatches\nkept by\nrank {rank}", rotation=0, ha="right", va="center"
    )


def draw_block(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Each rank's layers in the order in which it went through them, in two rows.

    A layer that is full on each rank is gray, a shard has its rank's color, and an
    indigo bar across all ranks is a message of all of them.
    """
    ways = ("forward", "backward")
    figure, axes = plt.subplots(2, 1, figsize=(8, 3.4))
    for axis, way in zip(axes, ways, strict=True):
        for rank, steps in enumerate(ranks):
            mine = [step for step in steps if step["way"] == way]
            for place, step in enumerate(mine):
                _layer(axis, place, rank, step)
                if rank == 0 and step["sent"]:
                    corner = place + 0.8, -0.05
                    axis.add_patch(
                        Rectangle(
                            corner, 0.14, len(ranks), facecolor=LINK_BUSY, zorder=3
                        )
                    )
        axis.set(
            title=f"{way}: an indigo bar is an all_reduce", ylim=(len(ranks), -0.1)
        )
        axis.set(xlim=(-0.05, len(mine)), xticks=[])
        axis.set_yticks([rank + 0.45 for rank in range(len(ranks))])
        axis.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
        axis.set_frame_on(False)
    figure.tight_layout()
    plt.show()


def _layer(axis: Axes, place: int, rank: int, step: Mapping[str, Any]) -> None:
    shared = step["weights"] < step["whole"]
    color = RANK_COLORS[rank % len(RANK_COLORS)] if shared else NEUTRAL
    axis.add_patch(Rectangle((place, rank), 0.76, 0.9, facecolor=color, edgecolor=INK))
    words = f"{step['layer']}\n{step['weights']:,}"
    middle = place + 0.38, rank + 0.45
    axis.annotate(words, middle, ha="center", va="center", fontsize=9)


def draw_errors(
    kinds: Sequence[str], errors: Mapping[str, Sequence[float]], *, floor: float
) -> None:
    """A group of marks per label, on a logarithmic scale that begins at `floor`."""
    _, axis = plt.subplots(figsize=(6.5, 2.8))
    width = 0.8 / len(kinds)
    for index, kind in enumerate(kinds):
        places = [place + index * width for place in range(len(errors))]
        values = [max(found[index], floor) for found in errors.values()]
        color, mark = METHODS[index % len(METHODS)], "osD^"[index % 4]
        axis.plot(places, values, mark, label=kind, color=color, ms=8)
    middle = width * (len(kinds) - 1) / 2
    axis.set_xticks([place + middle for place in range(len(errors))], list(errors))
    axis.set_yscale("log")
    axis.set(ylim=(floor / 3, 30), ylabel="relative error")
    axis.axhline(1e-10, color=MUTED, ls="--", lw=1)
    words, where = "below this line: rounding", ("axes fraction", "data")
    axis.annotate(words, (0.01, 3e-10), xycoords=where, color=MUTED, fontsize=9)
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()
