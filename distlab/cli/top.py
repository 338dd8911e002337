"""`distlab top FOLDER`: the records of a run, as they come, and whom they point at."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distlab.cli.screen import STYLES, moves, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from distlab.monitor.jsonl import Recorded
    from distlab.monitor.suspected import Suspected

    Namer = Callable[[Recorded], Suspected]

EVERY_S = 0.5
"""Seconds between two looks at the folder."""

TASK = "monitoring.suspects"

Folder = Annotated[Path, typer.Argument(help="What `distlab ddp --monitor` was given.")]
Once = Annotated[bool, typer.Option("--once", help="Show it once and end.")]


def top(folder: Folder, once: Once = False) -> int:
    """Watch a monitored run: losses, shares, and the ranks that are suspected."""
    from distlab.monitor.jsonl import read_folder
    from distlab.monitor.view import view

    size = shutil.get_terminal_size()
    recorded = read_folder(folder)  # what is no such folder is refused here
    if once or not moves():
        lines = view(
            recorded,
            time.time(),
            width=size.columns,
            height=size.lines,
            suspected=namer()(recorded),
        )
        show(lines)
        return 0
    return _live(folder)


def namer() -> Namer:
    """What names suspects: the unit `monitoring`, as `distlab use` says.

    It takes a second: torch is imported. What is wrong with the learner's file is a
    sentence in place of the suspects.
    """
    from distlab.curriculum import CurriculumError, SourceError, load_curriculum
    from distlab.curriculum.choose import chosen_unit
    from distlab.monitor.suspected import Suspected, suspected

    try:
        choice = chosen_unit(load_curriculum(), "monitoring")
        (part,) = (part for part in choice.parts if part.task == TASK)
        owner = "your" if part.whose == "mine" else "the reference's"
        whose, unit = f"{owner} {part.number}", choice.load()
    except (CurriculumError, SourceError) as error:
        sentence = str(error)
    except Exception as error:  # of the learner's file, while it was imported
        sentence = f"your file monitoring: {type(error).__name__}: {error}"
    else:
        return lambda recorded: suspected(recorded, unit, whose)
    nobody = Suspected(whose="no suspects", sentences=(sentence.splitlines()[0],))
    return lambda recorded: nobody


def _live(folder: Path) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    name: Namer | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            live.update(_frame(folder, console, name), refresh=True)
            name = namer()
            while True:
                live.update(_frame(folder, console, name), refresh=True)
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            pass
    last = _frame(folder, console, name)
    show([("plain", line.plain) for line in last.split("\n")])
    return 0


def _frame(folder: Path, console: Console, name: Namer | None) -> Text:
    from rich.text import Text

    from distlab.monitor.jsonl import read_folder
    from distlab.monitor.view import view

    recorded, (width, height) = read_folder(folder), console.size
    lines = view(
        recorded,
        time.time(),
        width=width,
        height=height - 1,
        suspected=name(recorded) if name else None,
    )
    lines.append(("dim", "Ctrl-C ends this view; the run goes on"))
    rows = [Text(text, style=STYLES.get(style, "")) for style, text in lines]
    return Text("\n").join(rows)
