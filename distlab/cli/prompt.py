"""Show screens with a title, plain lines, and a question at the bottom."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from distlab.cli.screen import show
from distlab.terminal import screen_width

_WITH_LINE_OPTION = ("vi", "vim", "nvim", "nano", "emacs", "micro", "kak", "hx")
_WITH_GOTO = ("code", "code-insiders", "codium", "cursor")


class QuitError(Exception):
    """The learner wants to stop for now, which isn't a failure."""


def title(text: str) -> None:
    """Begin a screen: clear a terminal, or skip a few lines elsewhere."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        sys.stdout.write("\x1b[2J\x1b[H")
    rule = "─" * max(0, screen_width() - len(text) - 3)
    show([("rule", f"{text} {rule}"), ("", "")])


def say(*lines: str) -> None:
    """Print plain lines."""
    show([("", line) for line in lines])


def ask(question: str, letters: str = "", *, enter: bool = True) -> str:
    """Return the letter that the learner typed, or "" for Enter.

    If the answer is neither one of `letters` nor an allowed Enter, we ask once more. A
    second invalid answer counts as Enter.

    Raises:
        QuitError: q, or the end of the input.
    """
    for turn in range(2):
        answer = _line(question).lower()
        if answer in ("q", "quit"):
            raise QuitError
        if answer in tuple(letters) or (enter and not answer):
            return answer
        if turn == 0:
            say(f"  Please {_choices(letters, enter=enter)}.")
    return ""


def ask_line(question: str) -> str:
    """Return the line that the learner typed, in its own upper and lower case.

    Raises:
        QuitError: q, or the end of the input.
    """
    answer = _line(question)
    if answer.lower() in ("q", "quit"):
        raise QuitError
    return answer


def _choices(letters: str, *, enter: bool) -> str:
    typed = f"type {', '.join([*letters, 'or q']) if letters else 'q'} to quit"
    return f"press Enter, or {typed}" if enter else typed


def _line(question: str) -> str:
    try:
        answer = input(question)
    except EOFError:
        print()
        raise QuitError from None
    if not sys.stdin.isatty():
        print()  # nobody typed the end of this line
    return answer.strip()


def offer_editor(path: str, line: int) -> None:
    """Ask whether to open `path` in the learner's own editor; never without asking."""
    wanted = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if not wanted or not sys.stdin.isatty():
        return
    name = os.path.basename(wanted[0])
    if ask(f"Open it in {name} now? y/N > ", "yn") != "y":
        return
    if name in _WITH_LINE_OPTION:
        place = [f"+{line}", path]
    elif name in _WITH_GOTO:
        place = ["--goto", f"{path}:{line}"]
    else:
        place = [path]
    try:
        subprocess.run([*wanted, *place], check=False)
    except OSError as error:
        say(f"Can't start {name}: {error.strerror}. Please open the file yourself.")
