"""Judge the claims of a CI job about a plan: "fits", "mfu >= 0.4", "step_s < 5".

Everything that can be compared is in `Figures`, which `--json` prints as well.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from distlab.sim.net.quantities import nearest

Figures = dict[str, float | None]
"""The numbers of the best plan by name; None if they aren't known."""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAIM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([^\s<>=]+)\s*")
NAMES = (
    *("mfu", "step_s", "memory_gb", "exposed", "bubble", "tokens_per_s", "days"),
    *("gpu_hours", "price"),
)


def require_judgeable(claim: str, *, tokens: bool, price: bool) -> None:
    """Require that a claim can be judged, with or without --tokens and --price.

    Raises:
        ValueError: it is neither "fits" nor a comparison of a known name with a number,
            or the name needs --tokens or --price.
    """
    parsed = _parsed(claim)
    name = parsed[0] if parsed else ""
    needed = []
    if name in ("days", "gpu_hours", "price") and not tokens:
        needed.append("--tokens")
    if name == "price" and not price:
        needed.append("--price")
    if needed:
        raise ValueError(f'--assert "{claim}" needs {" and ".join(needed)}')


def holds(claim: str, figures: Figures) -> bool:
    """Return True if the claim is true; without figures, nothing fits."""
    parsed = _parsed(claim)
    if not figures:
        return False
    if parsed is None:
        return True
    name, compare, value = parsed
    figure = figures[name]
    return figure is not None and compare(figure, value)


def _parsed(claim: str) -> tuple[str, Callable[[float, float], bool], float] | None:
    if claim.strip() == "fits":
        return None
    found = _CLAIM.fullmatch(claim)
    if not found:
        raise ValueError(
            f'--assert "{claim}" must be "fits" or look like "mfu >= 0.4"; it can '
            f"compare {', '.join(NAMES)}"
        )
    name, sign, number = found.groups()
    if name not in NAMES:
        near = nearest(name, NAMES)
        raise ValueError(
            f'--assert "{claim}": there is no {name}{near}; known are '
            f"{', '.join(NAMES)}"
        )
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f'--assert "{claim}": {number} is not a number') from None
    return name, _OPERATORS[sign], value
