"""What a sentence must name, however it is put."""

from __future__ import annotations

import re


def named(text: str, *values: object) -> bool:
    """Whether `text` has these values in this order, each as a word of its own."""
    found = (rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)" for value in values)
    return re.search(".*".join(found), text, re.DOTALL) is not None


def numbers(text: str) -> list[int]:
    """The whole numbers in `text`, in order."""
    return [int(found) for found in re.findall(r"(?<![\w.])\d+(?!\w|\.\d)", text)]
