"""Lines on the terminal: styled where it understands styles, plain elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distlab.paths import shown

WIDTH = 80
_STYLES = {"pass": "bold green", "fail": "bold red", "dim": "dim", "rule": "cyan"}


def show(lines: Iterable[tuple[str, str]]) -> None:
    """Print (style, line) pairs.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    from rich.console import Console
    from rich.text import Text

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with 1, which is "not yet" here

    console = OurConsole(highlight=False, soft_wrap=True)
    for style, line in lines:
        console.print(Text(line, style=_STYLES.get(style, "")))


def show_json(value: Any) -> None:
    """Print one JSON object and nothing else."""
    print(json.dumps(value, indent=1))  # ASCII, whatever the terminal can show


def warn(sentence: str) -> None:
    """One sentence beside the result, where `--json` and pipes do not see it."""
    text = f"distlab: {sentence}"
    # A file or a program that reads it gets one line, unless a width is asked for.
    if sys.stderr and (sys.stderr.isatty() or os.environ.get("COLUMNS")):
        text = "\n".join(wrapped(text))
    print(text, file=sys.stderr)


def wrapped(text: str, indent: str = "", hanging: str = "  ") -> list[str]:
    """The lines of a sentence, as wide as the screen and no wider than a verdict."""
    return textwrap.wrap(
        text,
        max(20, min(WIDTH, shutil.get_terminal_size().columns)),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def cut(line: str, width: int = WIDTH) -> str:
    """What fits of a line that a program printed."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def moves() -> bool:
    """Whether standard output is a screen on which a line can be taken back."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def stopped() -> int:
    """Say that Ctrl-C was heard, and give the exit code for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
    print("\nstopped; nothing is left running", file=sys.stderr)
    return 130


def command(verb: str) -> str:
    """How to type `distlab VERB` here: with its folder if it is not on the PATH."""
    if shutil.which("distlab"):
        return f"distlab {verb}".rstrip()
    program = Path(sys.prefix) / "bin" / "distlab"
    if not program.exists():
        return f"{shown(sys.executable)} -m distlab {verb}".rstrip()
    return f"{shown(program)} {verb}".rstrip()


def processes(count: int) -> str:
    """How many, in words."""
    return "1 process" if count == 1 else f"{count} processes"
