"""What a raised error is about, where one run has several unusual tensors.

Torch names no parameter and no case: "view size is not compatible …". If the run has a
tensor that such an error fits, the verdict says so first.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import Run


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
    return error.but(situation=error.situation or next(fits, ""))
