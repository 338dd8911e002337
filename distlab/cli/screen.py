"""Print lines, with styles if the terminal understands them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distlab.paths import shown
from distlab.terminal import WIDTH, screen_width

STYLES = {"pass": "bold green", "fail": "bold red", "dim": "dim", "rule": "cyan"}


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
        for row in _rows(line):
            console.print(Text(row, style=STYLES.get(style, "")))


def _rows(line: str) -> list[str]:
    """Return the line, wrapped between words if the screen is too narrow for it."""
    width = shutil.get_terminal_size().columns
    if len(line) <= width or not sys.stdout.isatty():
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line,
        max(20, width),
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def say_aloud(*lines: str) -> None:
    """Print lines as they are."""
    show([("plain", line) for line in lines])


def say_nothing(*lines: str) -> None:
    """Replace `say_aloud` when we print only a JSON object."""


def show_json(value: Any) -> None:
    """Print one JSON object and nothing else."""
    print(json.dumps(value, indent=1))  # ASCII, whatever the terminal can show


def warn(sentence: str) -> None:
    """Print a sentence where `--json` and pipes don't see it."""
    text = f"distlab: {sentence}"
    # A file or a program that reads it gets one line, unless a width is asked for.
    if sys.stderr and (sys.stderr.isatty() or os.environ.get("COLUMNS")):
        text = "\n".join(wrapped(text))
    print(text, file=sys.stderr)


def wrapped(text: str, indent: str = "", hanging: str = "  ") -> list[str]:
    """Wrap a sentence to the screen, but no wider than a verdict."""
    return textwrap.wrap(
        text,
        screen_width(),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def cut(line: str, width: int = WIDTH) -> str:
    """Cut a program's line to what fits on the screen."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def moves() -> bool:
    """Return True if standard output is a screen on which we can erase a line."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def waiting(text: str = "", *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show `text … 3 s` on a screen while the block runs, then remove it.

    The block gets a function that changes the text; an empty text removes the line.
    """
    if quiet or not moves():
        yield lambda _: None
        return
    line = _WaitingLine()
    try:
        line.show(text)
        yield line.show
    finally:
        line.close()


class _WaitingLine:
    """A line on the screen that counts the seconds since we first showed it."""

    def __init__(self) -> None:
        self._text = ""
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def show(self, text: str) -> None:
        """Show this text from now on."""
        with self._lock:
            if text.partition(" ")[0] != self._text.partition(" ")[0]:
                self._since = time.monotonic()
            self._text = text
            self._write()

    def close(self) -> None:
        """Remove the line."""
        self._closed.set()
        self._ticker.join()
        self.show("")

    def _tick(self) -> None:
        while not self._closed.wait(1):
            with self._lock:
                self._write()

    def _write(self) -> None:
        seconds = int(time.monotonic() - self._since)
        line = f"  {self._text} …" if self._text else ""
        line += f" {seconds} s" if self._text and seconds else ""
        print(f"\r\x1b[K{line[: screen_width() - 1]}", end="", flush=True)


def stopped() -> int:
    """Confirm a Ctrl-C, and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
    print("\nstopped; nothing is left running", file=sys.stderr)
    return 130


def command(verb: str) -> str:
    """Return how to type `distlab VERB` here, with its folder if not on the PATH."""
    if shutil.which("distlab"):
        return f"distlab {verb}".rstrip()
    program = Path(sys.prefix) / "bin" / "distlab"
    if not program.exists():
        return f"{shown(sys.executable)} -m distlab {verb}".rstrip()
    return f"{shown(program)} {verb}".rstrip()


def processes(count: int) -> str:
    """Say how many processes, in words."""
    return "1 process" if count == 1 else f"{count} processes"
