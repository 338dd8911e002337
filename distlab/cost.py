"""What a run costs: workers × hours × the price of one worker for an hour."""

from __future__ import annotations

SECONDS_AN_HOUR = 3600.0


def cost_of(num_workers: float, seconds: float, rate: float) -> float:
    """`rate` is what one worker costs an hour."""
    return num_workers * seconds / SECONDS_AN_HOUR * rate
