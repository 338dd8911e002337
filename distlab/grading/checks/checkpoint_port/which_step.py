"""Which checkpoint a new model loaded, of task 4.17."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.checkpoint_port.saver_runs import (
    FIRST,
    LATER,
    NEXT,
    SECOND,
)
from distlab.grading.kit.values import close
from distlab.grading.verdict import NotYetError

KEEP = "a folder for each step; an older one goes only when a newer one is complete"
NUMBERS = "the largest step of the folders that have a .metadata"


def expect_later(
    rank: int,
    loaded: dict[str, Any],
    found: dict[str, Any],
    when: str,
    slug: str = "",
) -> None:
    """It loaded step LATER; `slug` is for an older one.

    Raises:
        NotYetError: it did not; `when` begins the sentence.
    """
    if loaded["raised"]:
        raise NotYetError(f"{when}, load() on rank {rank} raised {loaded['raised']}")
    if loaded["step"] != LATER:
        is_older = loaded["step"] in (FIRST, SECOND, NEXT)
        raise NotYetError(
            f"{when}, load() on rank {rank} returned {loaded['step']}, expected "
            f"{LATER}",
            slug=slug if is_older else "",
            rule=NUMBERS,
        )
    if not close(loaded["weights"], found["later_weights"]):
        raise NotYetError(
            f"{when}, load() on rank {rank} returned {LATER} and loaded other weights, "
            "expected the saved ones"
        )


def expect_second(
    rank: int, loaded: dict[str, Any], found: dict[str, Any], when: str
) -> None:
    """It loaded step SECOND, or what was saved since.

    Raises:
        NotYetError: it did not; `when` says what had happened, if anything had.
    """
    saved = f"after saving steps {FIRST} and {SECOND}{when}"
    if loaded["raised"]:
        slug = "incomplete-is-newest" if when else ""
        raise NotYetError(
            f"{saved}, load() on rank {rank} raised {loaded['raised']}",
            slug=slug,
            rule="only a folder with a .metadata is complete" if slug else "",
        )
    lost = bool(when) and found["loaded"]["step"] == SECOND
    # The save that raises the last one's error may have been begun all the same.
    of_next = bool(when) and loaded["step"] == NEXT
    if loaded["step"] != SECOND and not of_next:
        raise NotYetError(
            f"{saved}, load() on rank {rank} returned {loaded['step']}, expected "
            f"{SECOND}",
            slug="last-complete-one-lost" if lost else "",
            rule=KEEP if lost else "",
        )
    right = found["later"] if of_next else found["loaded"]["weights"]
    if lost and not close(loaded["weights"], right):
        step = NEXT if of_next else SECOND
        raise NotYetError(
            f"{saved}, load() on rank {rank} gave step {step} other weights, expected "
            "the saved ones",
            slug="last-complete-one-lost",
            rule=KEEP,
        )
