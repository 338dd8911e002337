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
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    text_on,
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


def draw_losses(curves: Mapping[str, Sequence[float]]) -> None:
    """One curve per training; the later ones are drawn thinner, on top."""
    _, axis = plt.subplots(figsize=(6, 3))
    for index, (label, losses) in enumerate(curves.items()):
        color, alpha = _method(index), 1.0 if index else 0.4
        epochs, width = range(1, len(losses) + 1), 6 - 4 * index
        axis.plot(epochs, losses, label=label, lw=width, color=color, alpha=alpha)
    axis.set(xlabel="epoch", ylabel="training loss")
    axis.set_xticks(range(1, len(losses) + 1))
    axis.legend(frameon=False)
    plt.show()


def draw_bars(values: Mapping[str, float], *, label: str, least: float) -> None:
    """One dot for each value, with an axis that begins at `least`; bars from zero."""
    _, axis = plt.subplots(figsize=(6, 1.8))
    names = list(values)
    for row, (name, value) in enumerate(values.items()):
        if least:
            axis.plot(value, name, "o", color=_method(row), ms=9)
        else:
            axis.barh(name, value, color=_method(row))
        axis.annotate(
            f"{value:.3g}",
            (value, row),
            (10, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_ylim(len(names) - 0.5, -0.5)
    span = max(values.values()) - least
    axis.set(xlim=(least, least + 1.15 * span), xlabel=label)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    plt.show()


def draw_means(
    counts: Sequence[int], gradients: Sequence[float], means: Mapping[str, float]
) -> None:
    """A number line: each rank's gradient as large as its count, and the means."""
    _, axis = plt.subplots(figsize=(7, 1.8))
    for rank, (count, gradient) in enumerate(zip(counts, gradients, strict=True)):
        axis.scatter(gradient, 0, s=150 * count, color=_of_rank(rank), zorder=3)
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
    axis.axhline(0, color=MUTED, lw=1)
    axis.set(
        ylim=(-1, 0.7), yticks=[], xlabel="gradient; a dot is as large as its count"
    )
    axis.margins(x=0.2)
    axis.set_frame_on(False)
    plt.show()


def draw_mosaic(titles: Sequence[str], epochs: Sequence[Sequence[int]]) -> None:
    """Who reads which sample: one row per epoch, one square per sample."""
    _, axis = plt.subplots(figsize=(7, 0.5 + 0.45 * len(epochs)))
    for row, owners in enumerate(epochs):
        for sample, owner in enumerate(owners):
            color = _of_rank(owner)
            axis.add_patch(Rectangle((sample, row), 0.9, 0.85, facecolor=color))
            at = sample + 0.45, row + 0.45
            ink = text_on(color)
            axis.annotate(str(owner), at, ha="center", va="center", color=ink)
    axis.set(
        xlim=(0, len(epochs[0])),
        ylim=(len(epochs), 0),
        xlabel="sample; the number in a square: its rank",
    )
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
        axis.loglog(sizes, seconds, "o-", ms=3, label=label, color=_method(index))
    axis.set(xlabel=xlabel, ylabel="seconds")
    axis.set_xticks(sizes, [_short(size) for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False)
    axis.grid(color=GRID)
    plt.show()


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
