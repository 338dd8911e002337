"""Whose mistake is it? A task that builds on others is not to be named after theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from distlab.grading.clause import Judge
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.verdict import NotYetError

SHARDS = "data_loader.shard_indices"
SAMPLER = "data_loader.sampler"
LOADER = "data_loader.loader"


def builds_on(*siblings: str) -> Callable[[Judge], Judge]:
    """Where a check passes with the reference's `siblings`, the mistake is in those.

    The facts stay, the diagnosis goes: it would be that of the wrong function.
    """

    def around(judge: Judge) -> Judge:
        @functools.wraps(judge)
        def judged(impl: Implementation, harness: RankHarness) -> str | None:
            try:
                return judge(impl, harness)
            except NotYetError as own:
                new = tuple(name for name in siblings if name not in impl.grafts)
                if own.kind == "TIME" or not new:
                    raise
                if not _passes(judge, impl.with_grafts(new), harness):
                    raise
                raise _of_another(judge, impl, harness, own, new) from own

        return judged

    return around


def _of_another(
    judge: Judge,
    impl: Implementation,
    harness: RankHarness,
    own: NotYetError,
    siblings: tuple[str, ...],
) -> NotYetError:
    enough = (n for n in siblings if _passes(judge, impl.with_grafts((n,)), harness))
    guilty = next(enough, siblings[-1]).partition(".")[2]
    return NotYetError(
        f"{own.message}; not so with the reference's {guilty}",
        evidence=own.evidence,
        rule=f"this part seems right; look at your {guilty}",
        fatal=own.fatal,
        output=own.output,
    )


def _passes(judge: Judge, impl: Implementation, harness: RankHarness) -> bool:
    try:
        judge(impl, harness)
    except NotYetError:
        return False
    return True
