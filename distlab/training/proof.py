"""Decide by their weights, never by accuracy, if several ranks are one training."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-10  # between the ranks' weights and those of one process, in float64
ACCURACY_FLOOR = 0.94  # below this nothing was learnt that would be worth comparing


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Ranks and one process; `difference` is the largest between two weights."""

    difference: float
    digests: tuple[str, ...]
    accuracy: float
    tolerance: float = TOLERANCE
    accuracy_floor: float = ACCURACY_FLOOR

    @property
    def holds(self) -> bool:
        """True if all ranks have one process's weights, and can read digits."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return a sentence for each condition that isn't met."""
        found = []
        distinct = len(set(self.digests))
        if distinct != 1:
            found.append(
                f"REPLICAS DIFFER: {len(self.digests)} ranks hold {distinct} different "
                "sets of weights"
            )
        if not self.difference <= self.tolerance:  # also when it is not a number
            found.append(
                f"the weights are up to {self.difference:.1e} away from those of one "
                f"process; rounding explains {self.tolerance:.0e}"
            )
        if not self.accuracy >= self.accuracy_floor:
            found.append(
                f"held-out accuracy is {self.accuracy:.3f}, below {self.accuracy_floor}"
            )
        return found
