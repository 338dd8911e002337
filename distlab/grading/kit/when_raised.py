"""What a raised error is about, where one run has several unusual tensors.

Torch names no parameter and no case: "view size is not compatible …". If the run has a
tensor that such an error fits, the verdict says so first.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

_TAILS = (
    " (at least one dimension spans",
    " because the unspecified dimension size",
    " (or directly access saved",
    ". The gradient must match",
)
"""Where torch's text goes on with what the first half says already."""


def finished(runs: Runs, spec: Scenario | RunSpec, kinds: Mapping[str, str]) -> Run:
    """The record of a run that came to its end.

    `kinds` has words of an error, and what there is in this run that it may be about.

    Raises:
        NotYetError: it did not.
    """
    try:
        return runs.finished(spec)
    except NotYetError as error:
        raise told(error, kinds) from None


def told(error: NotYetError, kinds: Mapping[str, str]) -> NotYetError:
    """The same verdict, which says what the error is about; see `finished`."""
    if error.slug != "raised":
        return error
    fits = (kind for words, kind in kinds.items() if words in error.message)
    situation = error.situation or next(fits, "")
    return error.but(message=without_tail(error.message), situation=situation)


def without_tail(text: str) -> str:
    """Torch's text up to where it only repeats itself."""
    for tail in _TAILS:
        text = text.partition(tail)[0]
    return text
