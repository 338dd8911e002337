"""Turn rows of numbers into the figures and tables of phase 2's walkthrough.

`print_table` prints the numbers of a figure. We never rely on color alone, so each
color also has a word, a marker or a hatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from distlab.trace.palette import (
    ACTIVATIONS,
    BACKWARD,
    FAILURE,
    FORWARD,
    GRADIENTS,
    GRID,
    HIGHLIGHT,
    INK,
    METHODS,
    NEUTRAL,
    OPTIMIZER_STATE,
    WEIGHTS,
)
from distlab.walkthroughs.phase2 import Played, Rows, ScaleStep, Stages
from distlab.walkthroughs.tables import print_table as print_table

_LINES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
_HATCHES = ("", "///", "...", "xxx")
_KINDS = {"F": FORWARD, "B": BACKWARD}
_PARTS = {
    "parameters": WEIGHTS,
    "gradients": GRADIENTS,
    "optimizer state": OPTIMIZER_STATE,
    "activations": ACTIVATIONS,
}


def draw_stacked(rows: Rows, *, xlabel: str, ylabel: str) -> None:
    """Draw one bar for each row, with its parts one after another."""
    _, axis = plt.subplots(figsize=(7, 0.9 + 0.42 * len(rows)))
    starts = dict.fromkeys(rows, 0.0)
    for index, column in enumerate(next(iter(rows.values()))):
        values = [row[column] for row in rows.values()]
        left = list(starts.values())
        style = _bars(index, _PARTS[column])
        axis.barh(list(rows), values, left=left, label=column, **style)
        starts = {k: starts[k] + v for k, v in zip(rows, values, strict=True)}
    axis.invert_yaxis()
    axis.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None))
    _legend_beside(axis)
    plt.show()


def draw_bars(rows: Rows, *, xlabel: str, ylabel: str) -> None:
    """Draw a group of bars for each row, with one bar per column, from zero."""
    _, axis = plt.subplots(figsize=(6.5, 3))
    names = list(next(iter(rows.values())))
    width = 0.8 / len(names)
    for index, column in enumerate(names):
        values = [row[column] for row in rows.values()]
        offsets = [number + (index + 0.5) * width - 0.4 for number in range(len(rows))]
        bars = axis.bar(
            offsets, values, width, label=column, **_bars(index, METHODS[index])
        )
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
    _legend_beside(axis)
    plt.show()


def _bars(index: int, color: str) -> dict[str, Any]:
    return {"color": color, "hatch": _HATCHES[index], "edgecolor": "white"}


def draw_panels(
    xs: Sequence[float],
    panels: Mapping[str, Rows],
    *,
    xlabel: str,
    doubling: bool = False,
) -> None:
    """Draw line charts side by side, with a panel per y label and a line per column.

    With `doubling` the x axis is logarithmic. The y axes start at zero. The line "a,
    formula" goes through the markers of "a".
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(max(6.5, 4.2 * len(panels)), 3.2), squeeze=False
    )
    for axis, (ylabel, rows) in zip(axes[0], panels.items(), strict=True):
        for column, style in _styles(next(iter(rows.values()))).items():
            axis.plot(
                xs,
                [row[column] for row in rows.values()],
                label=column,
                clip_on=False,
                zorder=3,
                **style,
            )
        if doubling:
            axis.set_xscale("log", base=2)
        axis.set_xticks(list(xs), [f"{x:g}" for x in xs])
        axis.minorticks_off()
        axis.set(xlabel=xlabel, ylabel=ylabel)
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.legend(frameon=False)
        axis.grid(color=GRID)
    figure.tight_layout()
    plt.show()


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Make later lines thinner, so that you can see a line below them."""
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        measured = name.removesuffix(", formula")
        if measured != name:
            styles[measured]["ls"] = ""
            styles[name] = {**styles[measured], "ls": "--", "marker": "", "lw": 1.5}
            continue
        index = len({other.removesuffix(", formula") for other in styles})
        marker, line = _LINES[index % len(_LINES)]
        styles[name] = {
            "color": METHODS[index % len(METHODS)],
            "marker": marker,
            "ls": line,
            "lw": max(1.5, 3.5 - index),
            "ms": max(4.5, 7 - 1.25 * index),
        }
    return styles


def columns(rows: Rows, *names: str) -> Rows:
    """Return the same rows with only these columns."""
    return {label: {name: row[name] for name in names} for label, row in rows.items()}


def differences(rows: Rows, baseline: str) -> Rows:
    """Return how far every other column is from the baseline's."""
    return {
        label: {
            f"error, {column}": abs(value - row[baseline])
            for column, value in row.items()
            if column != baseline
        }
        for label, row in rows.items()
    }


def draw_groups(rows: Rows) -> None:
    """Draw peak activations by group size as bars, and no checkpointing as a line."""
    _, axis = plt.subplots(figsize=(6.5, 3))
    without, *groups = rows.items()
    values = [row["peak"] for _, row in groups]
    bars = axis.bar(
        [label.split()[-1] for label, _ in groups], values, color=ACTIVATIONS
    )
    axis.bar_label(bars, fmt="%g", fontsize=9)
    axis.axhline(without[1]["peak"], color=INK, ls="--", label=without[0])
    axis.set(
        xlabel="layers in a checkpointed group",
        ylabel="peak, in activations\nof one layer",
        ylim=(0, 1.3 * max(without[1]["peak"], *values)),
    )
    axis.legend(frameon=False, loc="upper center")
    plt.show()


def draw_loss_scale(steps: Sequence[ScaleStep]) -> None:
    """Draw the loss scale by step, with a cross where all ranks skip."""
    _, axis = plt.subplots(figsize=(6.5, 3))
    numbers, scales = range(len(steps)), [step.scale for step in steps]
    plain = [step.without_overflow for step in steps]
    axis.step(numbers, plain, "--", where="mid", color=METHODS[1], label="no overflow")
    axis.step(numbers, scales, where="mid", color=METHODS[0], lw=2.5, label="overflow")
    skipped = [number for number in numbers if not any(steps[number].stepped)]
    axis.plot(
        skipped,
        [scales[n] for n in skipped],
        "X",
        color=FAILURE,
        ms=11,
        label="all ranks skip",
    )
    axis.set_yscale("log", base=2)
    ticks = sorted({*scales, *plain})
    axis.set_yticks(ticks, [f"{scale:,.0f}" for scale in ticks])
    axis.minorticks_off()
    axis.set(xlabel="step", ylabel="loss scale")
    axis.set_xticks(range(0, len(steps), 2))
    axis.legend(frameon=False)
    axis.grid(color=GRID)
    plt.show()


def print_loss_scale(steps: Sequence[ScaleStep]) -> None:
    """Print for each step both scales, and each rank's gradient and action."""
    print("step   no overflow   overflow   gradients of ranks 0, 1   ranks 0, 1")
    for number, step in enumerate(steps):
        gradients = ", ".join("finite" if f else "inf" for f in step.finite)
        actions = ", ".join("step" if s else "skip" for s in step.stepped)
        print(
            f"{number:>4}   {step.without_overflow:>11,.0f}   {step.scale:>8,.0f}   "
            f"{gradients:<23}   {actions}"
        )


def draw_stages(ways: Mapping[str, Stages]) -> None:
    """Draw a bar per stage with its layers, and the bottleneck of each partition."""
    num_bars = sum(len(stages.costs) for stages in ways.values())
    _, axis = plt.subplots(figsize=(7, 0.9 + 0.42 * num_bars))
    for index, (way, stages) in enumerate(ways.items()):
        labels = [f"{way}, stage {number}" for number in range(len(stages.costs))]
        for label, layers in zip(labels, stages.layers, strict=True):
            start = 0.0
            for layer, cost in layers.items():
                axis.barh(label, cost, left=start, color=NEUTRAL, edgecolor=INK)
                if cost:
                    middle = start + cost / 2, label
                    axis.annotate(layer, middle, ha="center", va="center", fontsize=8)
                start += cost
        most = max(stages.costs)
        axis.barh(
            labels[stages.costs.index(most)],
            most,
            fill=False,
            edgecolor=HIGHLIGHT,
            lw=3,
            label="" if index else "bottleneck",
        )
        mean = sum(stages.costs) / len(stages.costs)
    axis.axvline(mean, color=INK, ls="--", lw=1.2, zorder=0, label="mean of the stages")
    axis.invert_yaxis()
    axis.set(xlabel="thousand multiplications per token", xlim=(0, None))
    _legend_beside(axis)
    plt.show()


def print_stages(ways: Mapping[str, Stages]) -> None:
    """Print the cost and the layers of each stage, and the bottleneck of each way."""
    for way, stages in ways.items():
        for number, layers in enumerate(stages.layers):
            cost = stages.costs[number]
            print(f"{way + f', stage {number}':<22} {cost:>6.1f}   {', '.join(layers)}")
        mean = sum(stages.costs) / len(stages.costs)
        print(f"{way}: bottleneck {max(stages.costs):.1f}, mean {mean:.1f}")


def draw_schedules(plays: Mapping[str, Played], *, unit: str) -> None:
    """Draw a panel for each schedule, all with the same time axis, in `unit`."""
    num_ranks = len(next(iter(plays.values())).rows)
    end = max(len(play.rows[0]) for play in plays.values())
    figure, axes = plt.subplots(
        len(plays),
        1,
        figsize=(11, (0.5 + 0.32 * num_ranks) * len(plays) + 0.4),
        sharex=True,
        squeeze=False,
    )
    for axis, (title, play) in zip(axes[:, 0], plays.items(), strict=True):
        for rank in range(num_ranks):
            for entry, start, length in play.blocks(rank):
                _block(axis, rank, entry, start, length)
        axis.set_title(title, fontsize=10)
        axis.set(xlim=(0, end), ylim=(num_ranks, 0), facecolor=NEUTRAL)
        axis.set_yticks(
            [rank + 0.45 for rank in range(num_ranks)],
            [f"rank {rank}" for rank in range(num_ranks)],
        )
    kinds = {"forward": "F", "backward": "B"}
    handles = [Patch(color=_KINDS[kind], label=word) for word, kind in kinds.items()]
    figure.legend(handles=handles, frameon=False, loc="upper right", ncols=2)
    axes[-1, 0].set_xlabel(f"time, in units of {unit}")
    figure.tight_layout()
    plt.show()


def _block(axis: Axes, rank: int, entry: str, start: int, length: int) -> None:
    """Draw a block, paler and marked with a ' if it isn't of the first chunk."""
    shade = 0.4 if entry.endswith("'") else 1.0
    corner = start, rank
    color = _KINDS[entry[0]]
    axis.add_patch(Rectangle(corner, length, 0.9, facecolor=color, alpha=shade))
    axis.add_patch(Rectangle(corner, length, 0.9, fill=False, edgecolor=INK, lw=0.6))
    middle = start + length / 2, rank + 0.47
    axis.annotate(entry[1:], middle, ha="center", va="center", fontsize=7)


def schedule_rows(plays: Mapping[str, Played]) -> Rows:
    """Return time, idle time of rank 0, and the most that two ranks keep at once.

    They keep activations, and the unit is one microbatch in all layers of a rank.
    """
    return {
        title: {
            "units of time": len(play.rows[0]),
            "idle": play.idle[0],
            "kept by rank 0": max(play.live(0)) / play.num_chunks,
            "kept by the last rank": max(play.live(-1)) / play.num_chunks,
        }
        for title, play in plays.items()
    }


def _legend_beside(axis: Axes) -> None:
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
