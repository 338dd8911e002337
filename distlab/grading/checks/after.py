"""A clause that may fail because of another one's mistake, and says nothing of it then.

"C3 fails too" would send a learner to look for a second mistake that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distlab.grading.clause import Judge
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.verdict import NotJudgedError, NotYetError


@contextmanager
def judged_after(
    other: Judge, impl: Implementation, harness: RankHarness, where: str, own: str = ""
) -> Iterator[None]:
    """What fails in here counts only if `other`, the check of clause `where`, passes.

    A mistake whose slug is `own` counts all the same.

    Raises:
        NotJudgedError: `other` finds a mistake too.
        NotYetError: it does not; or that has yet to be tried without company.
    """
    try:
        yield
    except NotYetError as failure:
        latest = harness.latest
        can_tell = not harness.has_company and (not own or failure.slug != own)
        if can_tell and _fails(other, impl, harness):
            raise NotJudgedError(f"see {where}") from failure
        harness.latest = latest
        raise


def _fails(other: Judge, impl: Implementation, harness: RankHarness) -> bool:
    try:
        other(impl, harness)
    except (NotYetError, NotJudgedError):
        return True
    return False
