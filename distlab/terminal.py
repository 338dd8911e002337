"""How wide the learner's screen is."""

from __future__ import annotations

import shutil

WIDTH = 80  # columns; verdicts and tables are made for it
_LEAST = 40


def screen_width() -> int:
    """Columns that a line may have: those of the terminal, from 40 to 80.

    Where there is no terminal, 80, or what COLUMNS says.
    """
    return max(_LEAST, min(WIDTH, shutil.get_terminal_size().columns))
