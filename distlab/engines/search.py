"""Draw the parameters of a search and decide which trials end, but start nothing.

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), section
3.3, asynchronous successive halving (https://arxiv.org/abs/1810.05934); here a trial
that is not promoted ends, and none is continued later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.engines.expect import EngineError


@dataclass(frozen=True)
class Choice:
    """One of several values, all equally likely."""

    values: Sequence[Any]

    def draw(self, source: random.Random) -> Any:
        """Draw a value."""
        return source.choice(list(self.values))


@dataclass(frozen=True)
class Uniform:
    """A number from an interval, or with `is_log` its logarithm is uniform."""

    low: float
    high: float
    is_log: bool = False

    def draw(self, source: random.Random) -> float:
        """Draw a value."""
        if self.is_log:
            return math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return source.uniform(self.low, self.high)


def choice(values: Sequence[Any]) -> Choice:
    """Draw one of `values`."""
    if not values:
        raise EngineError("choice([]) has no value to draw")
    return Choice(tuple(values))


def uniform(low: float, high: float) -> Uniform:
    """Draw a number between `low` and `high`."""
    return _interval(low, high, is_log=False)


def loguniform(low: float, high: float) -> Uniform:
    """Draw a number from `low` to `high`, half of the time below √(low·high)."""
    if low <= 0:
        raise EngineError(f"loguniform({low:g}, {high:g}): low must be more than 0")
    return _interval(low, high, is_log=True)


def _interval(low: float, high: float, *, is_log: bool) -> Uniform:
    if not low < high:
        raise EngineError(f"the interval from {low:g} to {high:g} is empty")
    return Uniform(low, high, is_log)


def draw(space: Mapping[str, Any], seed: int, trial: int) -> dict[str, Any]:
    """Draw a trial's parameters, which depend on the seed but not on trials' order.

    A list is a choice, and a dictionary holds more parameters. You can also use Ray
    Tune's domains and SciPy's distributions. Anything else is a constant.

    Raises:
        EngineError: a list is empty, or a parameter is a grid search.
    """
    source = random.Random(f"{seed}/{trial}")
    return {name: _drawn(name, own, source) for name, own in space.items()}


def _drawn(name: str, own: Any, source: random.Random) -> Any:
    if isinstance(own, list) and not own:
        raise EngineError(f"{name} is [], which has no value to draw")
    one = choice(own) if isinstance(own, list) else own
    if isinstance(one, dict):
        if one.keys() == {"grid_search"}:
            raise EngineError(
                f"{name} is a grid search, but trials are drawn at random: pass just "
                "the list"
            )
        return {key: _drawn(f"{name}.{key}", v, source) for key, v in one.items()}
    if hasattr(one, "draw"):
        return one.draw(source)
    for method in ("rvs", "sample"):  # SciPy's and Ray's
        drawn = getattr(one, method, None)
        if callable(drawn) and type(one).__module__.startswith(("scipy.", "ray.")):
            value = drawn(random_state=source.getrandbits(32))
            return value.item() if hasattr(value, "item") else value
    return one


class Asha:
    """Decides which trials continue: at each rung, the best 1/`reduction_factor`.

    There are rungs at `grace` reports and at its multiples by powers of the factor.
    """

    def __init__(self, grace: int = 1, reduction_factor: int = 3) -> None:
        if grace < 1 or reduction_factor < 2:
            raise EngineError("ASHA needs grace ≥ 1 and reduction_factor ≥ 2")
        self.grace, self.factor = grace, reduction_factor
        self.rungs: dict[int, list[float]] = {}

    def goes_on(self, num_reports: int, loss: float) -> bool:
        """Return True if a trial continues after this many reports and this last loss.

        A trial whose loss isn't finite, such as minus infinity, ends at its rung.
        """
        if not self.is_rung(num_reports):
            return True
        values = self.rungs.setdefault(num_reports, [])
        values.append(loss if math.isfinite(loss) else math.inf)
        values.sort()
        num_best = max(1, len(values) // self.factor)
        return math.isfinite(loss) and loss <= values[num_best - 1]

    def is_rung(self, num_reports: int) -> bool:
        """Return True if there is a rung after this many reports."""
        rung = self.grace
        while rung < num_reports:
            rung *= self.factor
        return rung == num_reports
