"""`distlab top`: show a run's records as they come, and the ranks they accuse."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distlab.cli.keys import pressed_keys
from distlab.cli.screen import STYLES, command, moves, show
from distlab.paths import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from distlab.monitor.jsonl import Recorded
    from distlab.monitor.suspected import Suspected

    Namer = Callable[[Recorded], Suspected]

EVERY_S = 0.5
"""How often we read the folder again, in seconds."""

_KEYS_S = 0.05  # between two looks at the keyboard

TASK = "monitoring.suspects"

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="The folder that you passed to --monitor or --records. The default is "
        "the newest one here."
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Show the run's current state, then exit.")
]


def top(folder: Folder = None, once: Once = False) -> int:
    """Watch a run's losses, its use of time and any suspicious ranks until it ends."""
    from distlab.monitor.jsonl import read_folder
    from distlab.monitor.view import view

    size = shutil.get_terminal_size()
    if folder is None:
        folder = _newest()
        show([("dim", shown(folder))])
    recorded = read_folder(folder)  # what is no such folder is refused here
    if once or recorded.is_over or not moves():
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


def _newest() -> Path:
    """Return the folder of the newest records below the working folder.

    Raises:
        ValueError: there is none.
    """
    from distlab.monitor.jsonl import newest_folder

    found = newest_folder(Path.cwd())
    if found is None:
        raise ValueError(
            "there are no records in this folder yet; to write some, run "
            f"{command('ddp --monitor runs/one')}, or name another folder: "
            f"{command('top FOLDER')}"
        )
    return found


def namer() -> Namer:
    """Load the unit `monitoring`, which names suspects, as `distlab use` says.

    This takes a second to import torch. If the learner's file has a mistake, a
    sentence about it replaces the suspects.
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
        sentence = f"your monitoring.py raised {type(error).__name__}: {error}"
    else:
        return lambda recorded: suspected(recorded, unit, whose)
    nobody = Suspected(whose="no suspects", sentences=(sentence.splitlines()[0],))
    return lambda recorded: nobody


def _live(folder: Path) -> int:
    """Show the folder until its run has ended, or q or Ctrl-C is pressed."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    name: Namer | None = None
    with (
        pressed_keys() as next_key,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            frame, is_over = _frame(folder, console, name)
            live.update(frame, refresh=True)
            name = namer()
            while not is_over and not _quits(next_key):
                frame, is_over = _frame(folder, console, name)
                live.update(frame, refresh=True)
        except KeyboardInterrupt:
            pass
    *last, _how_it_ends = _frame(folder, console, name)[0].split("\n")
    show([("plain", line.plain) for line in last])
    return 0


def _quits(next_key: Callable[[], str]) -> bool:
    """Wait for the next look at the folder; return True if q was pressed."""
    until = time.monotonic() + EVERY_S
    while time.monotonic() < until:
        if next_key() == "q":
            return True
        time.sleep(_KEYS_S)
    return False


def _frame(folder: Path, console: Console, name: Namer | None) -> tuple[Text, bool]:
    """Return the current view, and True if the run has ended."""
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
    lines.append(("dim", "press q to close this view; the run will continue"))
    rows = [Text(text, style=STYLES.get(style, "")) for style, text in lines]
    return Text("\n").join(rows), recorded.is_over
