"""Print the tables of the walkthroughs: rows of numbers and words as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

Cells = Mapping[str, Mapping[str, float | str]]
"""A row for each label, with a number or a word for each column."""


def print_table(rows: Cells, heading: str, digits: int = 2) -> None:
    """Print a line per row, with no decimals for integers and words unchanged.

    `heading` is printed above the labels.
    """
    columns = list(next(iter(rows.values())))
    texts = {
        label: [_text(row[column], digits) for column in columns]
        for label, row in rows.items()
    }
    first = max(len(heading), *map(len, rows))
    widths = [
        max(len(column), *(len(cells[place]) for cells in texts.values()))
        for place, column in enumerate(columns)
    ]
    for label, cells in {heading: columns, **texts}.items():
        padded = (cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
        print("   ".join([label.ljust(first), *padded]))


def _text(cell: float | str, digits: int) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,.{0 if isinstance(cell, int) else digits}f}"
