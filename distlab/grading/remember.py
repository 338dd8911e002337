"""What is kept of a verdict, whoever asked for it: the command line or pytest."""

from __future__ import annotations

from collections.abc import Sequence

from distlab.curriculum import Progress
from distlab.grading.verdict import TaskVerdict


def record(
    progress: Progress, verdict: TaskVerdict, worlds: Sequence[int] = ()
) -> None:
    """Note a verdict on the learner's own file.

    At world sizes of the learner's choosing (`worlds`) it does not count: one rank by
    itself, for example, lets nearly everything pass. Then it is only remembered as the
    latest verdict.

    Raises:
        ProgressUnavailableError: the progress file cannot be written.
    """
    if verdict.status in ("pass", "fail"):
        progress.record_verdict(
            verdict.id,
            passed=verdict.status == "pass",
            digest=verdict.function_digest,
            ran=verdict.ran,
            slug=verdict.slug,
            file_digest=verdict.digest,
            counts=not worlds,
        )
