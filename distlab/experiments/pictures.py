"""The walkthroughs' figures: each draws plain data that its caller prints as a table.

The colors are those of the guidelines' pictures: Okabe and Ito's, which people with
the common kinds of color blindness can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from distlab.trace.canvas import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, SKY

RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
"""One color per rank."""


def draw_family(results: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Before and after of four collectives: bit r of a chunk is rank r's part."""
    names = list(results[0])
    figure, axes = plt.subplots(1, len(names), figsize=(2.2 * len(names), 2.6))
    for axis, name in zip(axes, names, strict=True):
        for rank, result in enumerate(results):
            for place, bits in enumerate(result[name]):
                _chunk(axis, place, rank, bits, len(results))
        axis.set(title=name, xlim=(-0.1, len(results) + 0.1), yticks=[], xticks=[])
        axis.set(ylim=(len(results), -0.1))
        axis.set_frame_on(False)
    axes[0].set_yticks([r + 0.45 for r in range(len(results))])
    axes[0].set_yticklabels([f"rank {r}" for r in range(len(results))])
    figure.tight_layout()
    plt.show()


def _chunk(axis: Axes, place: int, rank: int, bits: int, count: int) -> None:
    """One square, in as many stripes as ranks have a part in it."""
    parts = [r for r in range(count) if bits >> r & 1]
    axis.add_patch(Rectangle((place, rank), 0.9, 0.9, facecolor=PALE, edgecolor=INK))
    for index, part in enumerate(parts):
        height = 0.9 / len(parts)
        corner = (place, rank + index * height)
        axis.add_patch(Rectangle(corner, 0.9, height, facecolor=RANKS[part % 6]))


def draw_losses(curves: Mapping[str, Sequence[float]]) -> None:
    """One curve per training; the later ones are drawn thinner, on top."""
    _, axis = plt.subplots(figsize=(6, 3))
    for index, (label, losses) in enumerate(curves.items()):
        width = 6 - 4 * index
        axis.plot(
            range(1, len(losses) + 1), losses, label=label, lw=width, color=RANKS[index]
        )
    axis.set(xlabel="epoch", ylabel="training loss")
    axis.set_xticks(range(1, len(losses) + 1))
    axis.legend(frameon=False)
    plt.show()


def draw_bars(values: Mapping[str, float], *, label: str, least: float) -> None:
    """One bar for each value, with an axis that begins at `least`."""
    _, axis = plt.subplots(figsize=(6, 1.8))
    axis.barh(list(values), list(values.values()), color=[GREEN, RED, ORANGE])
    axis.invert_yaxis()
    axis.set(xlim=(least, None), xlabel=label)
    plt.show()


def draw_means(
    counts: Sequence[int], gradients: Sequence[float], means: Mapping[str, float]
) -> None:
    """A number line: each rank's gradient as large as its count, and the means."""
    _, axis = plt.subplots(figsize=(7, 1.8))
    for rank, (count, gradient) in enumerate(zip(counts, gradients, strict=True)):
        axis.scatter(gradient, 0, s=150 * count, color=RANKS[rank], zorder=3)
        axis.annotate(
            f"rank {rank}: {count} × {gradient:g}", (gradient, 0.35), ha="center"
        )
    for height, (label, value) in zip((-0.45, -0.8), means.items(), strict=True):
        axis.annotate(
            f"{label}: {value:g}",
            (value, 0),
            (value, height),
            ha="center",
            arrowprops={"arrowstyle": "-|>", "color": INK},
        )
    axis.axhline(0, color=GREY, lw=1)
    axis.set(ylim=(-1, 0.7), yticks=[])
    axis.margins(x=0.2)
    axis.set_frame_on(False)
    plt.show()


def draw_mosaic(titles: Sequence[str], epochs: Sequence[Sequence[int]]) -> None:
    """Who reads which sample: one row per epoch, one square per sample."""
    _, axis = plt.subplots(figsize=(7, 0.5 + 0.45 * len(epochs)))
    for row, owners in enumerate(epochs):
        for sample, owner in enumerate(owners):
            color = RANKS[owner % 6]
            axis.add_patch(Rectangle((sample, row), 0.9, 0.85, facecolor=color))
            axis.annotate(
                str(owner), (sample + 0.45, row + 0.45), ha="center", va="center"
            )
    axis.set(xlim=(0, len(epochs[0])), ylim=(len(epochs), 0), xlabel="sample")
    axis.set_xticks([s + 0.45 for s in range(len(epochs[0]))])
    axis.set_xticklabels([str(s) for s in range(len(epochs[0]))])
    axis.set_yticks([r + 0.45 for r in range(len(epochs))])
    axis.set_yticklabels(list(titles))
    axis.set_frame_on(False)
    plt.show()


def draw_times(
    sizes: Sequence[int], times: Mapping[str, Sequence[float]], *, xlabel: str
) -> None:
    """Seconds against a size, both on logarithmic scales; one line per label."""
    _, axis = plt.subplots(figsize=(6, 3))
    for index, (label, seconds) in enumerate(times.items()):
        axis.loglog(sizes, seconds, "o-", ms=3, label=label, color=RANKS[index])
    axis.set(xlabel=xlabel, ylabel="seconds")
    axis.set_xticks(sizes, [_short(size) for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False)
    axis.grid(color=PALE)
    plt.show()


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
            color=RANKS[index % len(RANKS)],
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
    axis.grid(color=PALE)
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
        color = RANKS[index % len(RANKS)]
        axis.bar(places, values, width, label=label, color=color)
    axis.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(groups))], list(groups)
    )
    axis.set(ylabel=ylabel, ylim=(0, None))
    axis.legend(frameon=False)
    plt.show()
