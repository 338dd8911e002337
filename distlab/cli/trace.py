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
from distlab.tutor import last_run
from distlab.tutor.last_run import timeline_path

_TITLE = re.compile(r"<title>(.*?)</title>")


def trace() -> int:
    """Open the last timeline in a browser, or draw it as text if there is no screen."""
    path = timeline_path(Progress(load_curriculum().root))
    try:
        title = _TITLE.search(path.read_text(encoding="utf-8"))
    except OSError:
        check = command("check")
        show(
            [("plain", f"there is no timeline yet; `{check}` draws one when it fails")]
        )
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


def keep_timeline(progress: Progress, verdict: TaskVerdict) -> list[tuple[str, str]]:
    """Call `last_run.keep_timeline`, and report an error beside the verdict."""
    return last_run.keep_timeline(progress, verdict, warn)


def open_page(path: Path, fragment: str = "") -> None:
    """Open the page in a browser with windows; never one in this terminal.

    `fragment` is empty, or a `#` and the place on the page.
    """
    if has_screen():
        webbrowser.open(f"{path.resolve().as_uri()}{fragment}")


def has_screen() -> bool:
    """Return True if this is a terminal beside which a browser can open a window."""
    windows = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return windows and sys.stdout.isatty()
