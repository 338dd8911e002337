"""The reference's run beside a learner's that failed, for the picture of it.

The ranks, the scenario and its numbers are the same. It is played when the picture is
drawn, after the verdict, and given up where it would keep the learner waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distlab.grading.harness import Implementation, RankHarness
from distlab.runner import Run, RunCancelledError, RunnerError

LIMIT_S = 0.25


def reference_of_latest(
    impl: Implementation, bench: RankHarness
) -> Callable[[], Run | None] | None:
    """What plays the reference as the latest run was played; None if there was none.

    It returns None where the reference does not come to its end in LIMIT_S.
    """
    play = bench.latest_play
    if bench.latest is None or play is None:
        return None

    def played() -> Run | None:
        limits = replace(bench.limits, seconds=min(LIMIT_S, bench.limits.seconds))
        alone = RankHarness(bench.cluster, bench.world_size, bench.seed, limits)
        right = Implementation(impl.reference, impl.reference)
        try:
            run = alone.observe(right, play.scenario, **dict(play.values))
        except (RunnerError, RunCancelledError):
            return None
        return _without_lines(run) if run.outcome == "finished" else None

    return played


def _without_lines(run: Run) -> Run:
    """The same run as if nobody knew its source: the picture must not show that."""
    for record in run.ranks:
        for event in record.journal:
            if "file" in event:
                event["file"], event["line"] = "", 0
    return run
