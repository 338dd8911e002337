"""Keep the last failing run: its timeline as a page and as text, and its verdict."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distlab.curriculum import Progress
from distlab.grading import TaskVerdict
from distlab.grading.report import lines_of, plain
from distlab.paths import shown


def timeline_path(progress: Progress) -> Path:
    """Return the path of the last failing run's timeline."""
    return progress.folder / "last" / "trace.html"


def verdict_path(progress: Progress) -> Path:
    """Return the path of the verdict on that run, in the form the learner saw."""
    return timeline_path(progress).with_name("verdict.txt")


def keep_timeline(
    progress: Progress,
    verdict: TaskVerdict,
    warn: Callable[[str], None] = lambda _: None,
    *,
    at: Path | None = None,
) -> list[tuple[str, str]]:
    """Draw the run that failed, if one did, and return a dim line that says where.

    Once the task has passed, the page also shows the reference's run if that is quick.
    Before then it would give the solution away. If you pass `at`, the page is written
    there and shows only the learner's run. If the timeline can't be drawn or written,
    the verdict stays the same.
    """
    failure = verdict.first_failure()
    if failure is None or failure.run is None or verdict.is_plan:
        return []  # in a plan no rank sends anything, so there is nothing to draw
    if failure.is_played:
        return []  # a single process acted as all ranks
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
        return []  # another place reports, once, that we cannot keep anything
    except Exception as error:
        if os.environ.get("DISTLAB_TRACEBACK"):
            raise
        warn(f"we could not draw the timeline: {type(error).__name__}: {error}")
        return []
    return [("dim", f"  timeline: {shown(path)}")]
