"""A clause that may fail because of another one's mistake, and says nothing of it then.

"C3 fails too" would send a learner to look for a second mistake that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distlab.grading.clause import Judge
from distlab.grading.runs import Runs
from distlab.grading.verdict import NotJudgedError, NotYetError


@contextmanager
def judged_after(other: Judge, runs: Runs, where: str, own: str = "") -> Iterator[None]:
    """What fails in here counts only if `other`, the check of clause `where`, passes.

    A mistake whose slug is `own` counts all the same.

    Raises:
        NotJudgedError: `other` finds a mistake too.
        NotYetError: it does not.
    """
    try:
        yield
    except NotYetError as failure:
        is_own = own and failure.slug == own
        if not is_own and _fails(other, runs):
            raise NotJudgedError(f"see {where}") from failure
        raise


def _fails(other: Judge, runs: Runs) -> bool:
    try:
        other(runs)
    except (NotYetError, NotJudgedError):
        return True
    return False
