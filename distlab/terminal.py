"""How wide the learner's screen is, and how ranks and lists are written there."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence

WIDTH = 80  # columns; verdicts and tables are made for it
_LEAST = 40
_RANKS_LISTED = 6


def screen_width() -> int:
    """Columns that a line may have: those of the terminal, from 40 to 80.

    Where there is no terminal, 80, or what COLUMNS says.
    """
    return max(_LEAST, min(WIDTH, shutil.get_terminal_size().columns))


def enumerated(items: Iterable[object]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0–3`, or `ranks 0, 2, 3`; of many the first and the last."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    if len(ranks) <= _RANKS_LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks, {ranks[0]} … {ranks[-1]}"
