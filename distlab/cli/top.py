"""`distlab top FOLDER`: the records of a run, as they come."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distlab.cli.screen import STYLES, moves, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

EVERY_S = 0.5
"""Seconds between two looks at the folder."""

Folder = Annotated[Path, typer.Argument(help="What `distlab ddp --monitor` was given.")]
Once = Annotated[bool, typer.Option("--once", help="Show it once and end.")]


def top(folder: Folder, once: Once = False) -> int:
    """Watch a monitored run: losses, shares and the ranks that are behind."""
    from distlab.monitor.jsonl import read_folder
    from distlab.monitor.view import view

    size = shutil.get_terminal_size()
    recorded = read_folder(folder)  # what is no such folder is refused here
    if once or not moves():
        show(view(recorded, time.time(), width=size.columns, height=size.lines))
        return 0
    return _live(folder)


def _live(folder: Path) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_frame(folder, console), refresh=True)
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            pass
    show([("plain", line.plain) for line in _frame(folder, console).split("\n")])
    return 0


def _frame(folder: Path, console: Console) -> Text:
    from rich.text import Text

    from distlab.monitor.jsonl import read_folder
    from distlab.monitor.view import view

    width, height = console.size
    lines = view(read_folder(folder), time.time(), width=width, height=height - 1)
    lines.append(("dim", "Ctrl-C ends this view; the run goes on"))
    rows = [Text(text, style=STYLES.get(style, "")) for style, text in lines]
    return Text("\n").join(rows)
