"""Check which values a message names, however it is worded."""

from __future__ import annotations

import re


def named(text: str, *values: object) -> bool:
    """Return True if `text` has these values in this order, each as a whole word."""
    found = (rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)" for value in values)
    return re.search(".*".join(found), text, re.DOTALL) is not None


def numbers(text: str) -> list[int]:
    """Return the integers in `text`, in order."""
    return [int(found) for found in re.findall(r"(?<![\w.])\d+(?!\w|\.\d)", text)]
