"""Draw the walkthroughs' figures from plain data that the caller prints as a table.

The colors are those of the guide's pictures, in `distlab.trace.palette`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from distlab.trace.palette import (
    GRID,
    METHODS,
)


def _method(index: int) -> str:
    return METHODS[index % len(METHODS)]


def _short(size: int) -> str:
    """Shorten 2,097,152 to 2M, because there is little room below an axis."""
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
    """Draw one line per label. `log` names the logarithmic axes: "", "x", "y" or "xy".

    A linear axis of values begins at zero. Later lines are thinner, so that lines that
    coincide stay visible. A logarithmic axis of values begins at `least`.
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
    """Draw a group of bars for each name, with one bar per label, from zero."""
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
