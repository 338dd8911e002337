"""The walkthroughs' figures: each draws plain data that its caller prints as a table.

The colors are those of the guide's pictures: `distlab.trace.palette`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from distlab.trace.palette import (
    GRID,
    INK,
    METHODS,
    NEUTRAL,
    RANK_COLORS,
)


def draw_family(results: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Before and after of four collectives: bit r of a chunk is rank r's part."""
    names = list(results[0])
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.2 * len(names), 3.1), layout="constrained"
    )
    for axis, name in zip(axes, names, strict=True):
        for rank, result in enumerate(results):
            for place, bits in enumerate(result[name]):
                _chunk(axis, place, rank, bits, len(results))
        axis.set(title=name, xlim=(-0.1, len(results) + 0.1), yticks=[], xticks=[])
        axis.set(ylim=(len(results), -0.1))
        axis.set_xlabel("chunks", fontsize=9)
        axis.set_frame_on(False)
    axes[0].set_yticks([r + 0.45 for r in range(len(results))])
    axes[0].set_yticklabels([f"rank {r}" for r in range(len(results))])
    figure.legend(
        handles=[Patch(color=_of_rank(r), label=f"{r}") for r in range(len(results))],
        title="a stripe: the values of rank …",
        title_fontsize=9,
        loc="outside lower center",
        ncols=len(results),
        frameon=False,
    )
    plt.show()


def _chunk(axis: Axes, place: int, rank: int, bits: int, count: int) -> None:
    """One square, in as many stripes as ranks have a part in it."""
    parts = [r for r in range(count) if bits >> r & 1]
    axis.add_patch(Rectangle((place, rank), 0.9, 0.9, facecolor=NEUTRAL, edgecolor=INK))
    for index, part in enumerate(parts):
        height = 0.9 / len(parts)
        corner = (place, rank + index * height)
        axis.add_patch(Rectangle(corner, 0.9, height, facecolor=_of_rank(part)))


def _of_rank(rank: int) -> str:
    return RANK_COLORS[rank % len(RANK_COLORS)]


def _method(index: int) -> str:
    return METHODS[index % len(METHODS)]


def _short(size: int) -> str:
    """2,097,152 as 2M: there is little room below an axis."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)


def draw_lines(
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    least: float | None = None,
) -> None:
    """One line per label; `log` names the logarithmic axes: "", "x", "y" or "xy".

    A linear axis of values begins at zero. Lines that coincide stay visible: the later
    ones are thinner. `least` is where a logarithmic axis of values begins.
    """
    _, axis = plt.subplots(figsize=(6, 3))
    for index, (label, values) in enumerate(lines.items()):
        width = max(1.0, 4.0 - 1.2 * index)
        axis.plot(
            xs,
            values,
            "os^Dv"[index % 5] + "-",
            lw=width,
            ms=width + 3,
            label=label,
            color=_method(index),
        )
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")
        axis.set_ylim(least, None)
    else:
        axis.set_ylim(0, None)
    axis.set_xticks(xs, [_short(int(x)) for x in xs])
    axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(color=GRID)
    axis.legend(frameon=False)
    plt.show()


def draw_grouped_bars(
    groups: Sequence[str], bars: Mapping[str, Sequence[float]], *, ylabel: str
) -> None:
    """A group of bars for each name, one bar per label; the axis begins at zero."""
    _, axis = plt.subplots(figsize=(6, 3))
    width = 0.8 / len(bars)
    for index, (label, values) in enumerate(bars.items()):
        places = [place + index * width for place in range(len(groups))]
        color = _method(index)
        axis.bar(places, values, width, label=label, color=color)
    axis.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(groups))], list(groups)
    )
    axis.set(ylabel=ylabel, ylim=(0, None))
    axis.legend(frameon=False)
    plt.show()
