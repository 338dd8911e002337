"""Turn rows of numbers into the figures and tables of phase 3's lab.

`print_table` prints the numbers of a figure. We never rely on color alone, so each
color also has a word, a marker or a hatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from distlab.trace.palette import (
    ALGORITHMS,
    FAILURE,
    GRID,
    INK,
    LINK_BUSY,
    METHODS,
    RANK_COLORS,
)
from distlab.walkthroughs.phase3 import Rows
from distlab.walkthroughs.phase3_services import END_S, Launched
from distlab.walkthroughs.tables import print_table as print_table

LETTERS = {"naive": "n", "ring": "r", "recursive doubling": "d", "hierarchical": "h"}
_COLORS = {
    **ALGORITHMS,
    "halving doubling": METHODS[0],
    "message": LINK_BUSY,
    "pipelined ring": METHODS[2],
    "ring of 3.3": METHODS[1],
    "yours": METHODS[1],
    "torch's": METHODS[2],
}
_MARKERS = "os^D"
_HATCHES = ("", "///", "...", "xxx")
_ESTIMATE = ", estimate"
_ENDS: dict[str, dict[str, Any]] = {
    "failed": {"marker": "X", "color": FAILURE, "mec": INK},
    "stopped": {"marker": "|", "color": INK, "mew": 3},
    "killed": {"marker": "s", "color": INK},
}


def draw_lines(
    rows: Rows, *, xlabel: str, ylabel: str, logs: str = "", marks_lowest: bool = False
) -> None:
    """Draw a line per column over the rows, whose labels are numbers.

    The line "ring, estimate" goes through the markers of "ring". `logs` names the
    logarithmic axes, "x" and "y". A linear y axis starts at zero.
    """
    _, axis = plt.subplots(figsize=(6.5, 3.2))
    xs = [float(label) for label in rows]
    columns = list(next(iter(rows.values())))
    names = [column for column in columns if not column.endswith(_ESTIMATE)]
    for index, name in enumerate(names):
        ys = [row[name] for row in rows.values()]
        color = _COLORS.get(name, METHODS[index % len(METHODS)])
        style: dict[str, Any] = {"color": color, "marker": _MARKERS[index % 4]}
        has_estimate = name + _ESTIMATE in columns
        if has_estimate:
            style |= {"ms": 7, "mfc": "none", "ls": ""}
        else:  # later lines are thinner, so that a line below them can be seen
            style |= {"ms": max(5, 8 - 2 * index), "lw": max(1.5, 4 - 1.5 * index)}
        axis.plot(xs, ys, label=name, clip_on=False, zorder=3, **style)
        if has_estimate:
            estimate = [row[name + _ESTIMATE] for row in rows.values()]
            axis.plot(xs, estimate, label=name + _ESTIMATE, color=color, lw=1.5)
        if marks_lowest:
            lowest = min(ys)
            axis.plot(xs[ys.index(lowest)], lowest, "o", ms=13, mfc="none", color=INK)
    _label_axes(axis, xs, logs)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    axis.grid(color=GRID)
    plt.show()


def _label_axes(axis: Axes, xs: Sequence[float], logs: str) -> None:
    if "x" in logs:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
    axis.set_xticks(xs, [f"{x:g}" for x in xs])
    if "y" in logs:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def draw_bars(
    rows: Rows, columns: Sequence[str], *, ylabel: str, is_stacked: bool = False
) -> None:
    """Draw a bar for each of these columns in every row, from zero."""
    _, axis = plt.subplots(figsize=(6.5, 3))
    width = 0.6 if is_stacked else 0.8 / len(columns)
    bottoms = [0.0] * len(rows)
    for index, column in enumerate(columns):
        values = [row[column] for row in rows.values()]
        shift = 0 if is_stacked else (index + 0.5) * width - 0.4
        style: dict[str, Any] = {"color": METHODS[index], "hatch": _HATCHES[index]}
        xs = [number + shift for number in range(len(rows))]
        axis.bar(xs, values, width, bottoms, label=column, edgecolor="white", **style)
        if is_stacked:
            bottoms = [b + v for b, v in zip(bottoms, values, strict=True)]
    axis.set_xticks(range(len(rows)), [label.replace(" ", "\n") for label in rows])
    axis.set(ylabel=ylabel)
    axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
    axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    plt.show()


def draw_moments(rows: Rows, *, xlabel: str, ylabel: str) -> None:
    """Draw a stair for each column over the moments that the rows name, from zero."""
    _, axis = plt.subplots(figsize=(7, 3.2))
    names = list(next(iter(rows.values())))
    for index, name in enumerate(names):
        values = [row[name] for row in rows.values()]
        style: dict[str, Any] = {"color": METHODS[index], "ls": ("-", "--")[index % 2]}
        axis.plot(
            range(len(rows)), values, label=name, lw=2, marker=_MARKERS[index], **style
        )
    labels = [label.removesuffix(", done") for label in rows]
    shown = [i for i, label in enumerate(labels) if not label.endswith(", ready")]
    axis.set_xticks(shown, [labels[i] for i in shown], rotation=40, ha="right")
    axis.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    axis.legend(frameon=False)
    axis.grid(color=GRID, axis="y")
    plt.show()


def draw_lifelines(launched: Launched) -> None:
    """Draw a bar for each process, and a marker that says how it ended."""
    _, axis = plt.subplots(figsize=(8, 2.2))
    for line in launched.lifelines:
        length = line.to_s - line.from_s
        color = RANK_COLORS[line.rank]
        axis.barh(line.rank, length, 0.6, line.from_s, color=color, edgecolor=INK)
        if line.rank == 0:
            middle = (line.from_s + line.to_s) / 2, 0
            axis.annotate(f"{line.generation}", middle, ha="center", va="center")
        if line.end in _ENDS:
            axis.plot(
                line.to_s, line.rank, ls="", ms=9, clip_on=False, **_ENDS[line.end]
            )
    ranks = sorted({line.rank for line in launched.lifelines})
    axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set(xlim=(0, END_S), xlabel="s; the number in a bar is the generation")
    handles = [Line2D([], [], ls="", ms=9, label=how, **s) for how, s in _ENDS.items()]
    axis.legend(
        handles=handles, frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left"
    )
    plt.show()


def print_choices(
    counts: Sequence[int], choices: Mapping[str, Sequence[Sequence[str]]]
) -> None:
    """Print the figure's letters, with a group per title in each row."""
    wide = {title: max(len(title), 2 * len(c[0]) - 1) for title, c in choices.items()}
    heads = ["ranks", *(title.ljust(wide[title]) for title in choices)]
    print("   ".join(heads).rstrip())
    for row, n in enumerate(counts):
        groups = (
            " ".join(LETTERS[name] for name in rows[row]).ljust(wide[title])
            for title, rows in choices.items()
        )
        print("   ".join([f"{n:>5}", *groups]).rstrip())


def draw_choices(
    counts: Sequence[int],
    sizes: Sequence[int],
    choices: Mapping[str, Sequence[Sequence[str]]],
) -> None:
    """Draw a grid for each title, with a lettered square per ranks and size."""
    figure, axes = plt.subplots(
        1, len(choices), figsize=(4.6 * len(choices), 1.3 + 0.36 * len(counts))
    )
    for axis, (title, rows) in zip(axes, choices.items(), strict=True):
        for row, names in enumerate(rows):
            for column, name in enumerate(names):
                square = Rectangle((column, row), 0.95, 0.9, facecolor="white")
                square.set(edgecolor=_COLORS[name], linewidth=2.5)
                axis.add_patch(square)
                middle = (column + 0.47, row + 0.45)
                axis.annotate(LETTERS[name], middle, ha="center", va="center")
        axis.set(xlim=(-0.1, len(sizes)), ylim=(len(counts), -0.1), title=title)
        axis.set_yticks([r + 0.45 for r in range(len(rows))], [f"{n}" for n in counts])
        labels = [_size(size) for size in sizes]
        axis.set_xticks([c + 0.47 for c in range(len(sizes))], labels, size=7)
        axis.tick_params(axis="x", rotation=60)
        axis.set(xlabel="bytes on each rank", ylabel="ranks")
        axis.set_frame_on(False)
    names = sorted({n for rows in choices.values() for row in rows for n in row})
    handles = [Patch(color=_COLORS[n], label=f"{LETTERS[n]}: {n}") for n in names]
    figure.tight_layout()
    axes[-1].legend(
        handles=handles, frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left"
    )
    plt.show()


def _size(num_bytes: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"
