"""Two numbers in a verdict, with as many digits as it takes to see that they differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_DIGITS = (3, 5, 8, 17)  # 17 tell any two doubles apart


def said(number: float, digits: int = 3) -> str:
    """A number as one writes it: 0.203, 2,063 or 3.54e+06."""
    is_whole = math.isfinite(number) and number == int(number)
    if is_whole and abs(number) < 10 ** max(digits, 4):
        return f"{int(number):,}"
    if 1e3 <= abs(number) < 1e6 and digits < 5:
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def apart(
    got: Any, expected: Any, *, say: Callable[[Any, int], str] = said
) -> tuple[str, str]:
    """Both in three significant digits, or in more if they would look alike.

    They are numbers, or what `say` writes with so many digits.
    """
    for digits in _DIGITS:
        pair = say(got, digits), say(expected, digits)
        if pair[0] != pair[1]:
            break
    return pair
