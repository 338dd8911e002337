"""The last failing run as it is kept: a page, the same as text, and its verdict."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distlab.curriculum import Progress
from distlab.grading import TaskVerdict
from distlab.grading.report import lines_of, plain
from distlab.paths import shown


def timeline_path(progress: Progress) -> Path:
    """Where the timeline of the last failing run is kept."""
    return progress.folder / "last" / "trace.html"


def verdict_path(progress: Progress) -> Path:
    """Where the verdict on that run is kept, as it was shown."""
    return timeline_path(progress).with_name("verdict.txt")


def keep_timeline(
    progress: Progress,
    verdict: TaskVerdict,
    warn: Callable[[str], None] = lambda _: None,
    *,
    at: Path | None = None,
) -> list[tuple[str, str]]:
    """Draw the run that failed, if one did, and say in a dim line where it is.

    Once the task has passed, the reference's run stands below where it is quick:
    before that it would give the solution away. With `at` the page is written there,
    and nothing but the learner's run stands on it.
    A timeline that cannot be drawn or written changes no verdict.
    """
    failure = verdict.first_failure()
    if failure is None or failure.run is None or verdict.is_plan:
        return []  # in a plan no rank sends anything: there is nothing to draw
    if failure.is_played:
        return []  # one process played all ranks
    from distlab.trace import draw_text, to_html

    title = f"{verdict.number} {verdict.id} {failure.id}: {failure.world_size} ranks"
    path = at or timeline_path(progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = progress.read().get("tasks", {}).get(verdict.id, {})
        has_passed = bool(entry.get("passed")) and at is None
        play = failure.reference_run if has_passed else None
        right = play() if play else None
        said = failure.message
        to_html(failure.run, path, beside=right, title=title, verdict=said)
        rows = "\n".join(draw_text(failure.run))
        path.with_suffix(".txt").write_text(rows, encoding="utf-8", errors="replace")
        if at is None:
            said = plain(lines_of(verdict))
            verdict_path(progress).write_text(said, encoding="utf-8", errors="replace")
    except OSError:
        return []  # that nothing can be kept is said elsewhere, once
    except Exception as error:
        if os.environ.get("DISTLAB_TRACEBACK"):
            raise
        warn(f"the timeline could not be drawn: {type(error).__name__}: {error}")
        return []
    return [("dim", f"  timeline: {shown(path)}")]
