"""`distlab trace`: the last failing run as a timeline in the browser."""

from __future__ import annotations

import html
import os
import re
import sys
import webbrowser
from pathlib import Path

from distlab.cli.screen import command, show, warn, wrapped
from distlab.curriculum import Progress, load_curriculum
from distlab.grading import FAILED, TaskVerdict
from distlab.paths import shown

_TITLE = re.compile(r"<title>(.*?)</title>")


def trace() -> int:
    """Open the last timeline where there is a screen for it; else draw it as text."""
    path = timeline_path(Progress(load_curriculum().root))
    try:
        title = _TITLE.search(path.read_text(encoding="utf-8"))
    except OSError:
        check = command("check")
        show([("plain", f"no timeline yet: a failing `{check}` draws one")])
        return FAILED
    if title:
        show([("plain", line) for line in wrapped(html.unescape(title[1]))])
    show([("plain", shown(path))])
    if has_screen():
        open_page(path)
    else:
        show([("plain", line) for line in ["", *_as_text(path)]])
    return 0


def _as_text(path: Path) -> list[str]:
    try:
        return path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def timeline_path(progress: Progress) -> Path:
    """Where the timeline of the last failing run is kept."""
    return progress.folder / "last" / "trace.html"


def keep_timeline(progress: Progress, verdict: TaskVerdict) -> list[tuple[str, str]]:
    """Draw the run that failed, if one did, and say in a dim line where it is.

    Once the task has passed, the reference's run stands below where it is quick:
    before that it would give the solution away.
    A timeline that cannot be drawn or written changes no verdict.
    """
    failure = verdict.first_failure()
    if failure is None or failure.run is None or verdict.is_plan:
        return []  # in a plan no rank sends anything: there is nothing to draw
    if failure.run.world_size == 1 != failure.world_size:
        return []  # one process played all ranks
    from distlab.trace import draw_text, to_html

    title = f"{verdict.number} {verdict.id} {failure.id}: {failure.world_size} ranks"
    path = timeline_path(progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = progress.read().get("tasks", {}).get(verdict.id, {})
        has_passed = bool(entry.get("passed"))
        play = failure.reference_run if has_passed else None
        right = play() if play else None
        said = failure.message
        to_html(failure.run, path, beside=right, title=title, verdict=said)
        rows = "\n".join(draw_text(failure.run))
        path.with_suffix(".txt").write_text(rows, encoding="utf-8", errors="replace")
    except OSError:
        return []  # that nothing can be kept is said elsewhere, once
    except Exception as error:
        if os.environ.get("DISTLAB_TRACEBACK"):
            raise
        warn(f"the timeline could not be drawn: {type(error).__name__}: {error}")
        return []
    return [("dim", f"  timeline: {shown(path)}")]


def open_page(path: Path) -> None:
    """Open the page in a browser with windows; never one in this terminal."""
    if has_screen():
        webbrowser.open(path.resolve().as_uri())


def has_screen() -> bool:
    """Whether this is a terminal beside which a browser can open a window."""
    windows = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return windows and sys.stdout.isatty()
