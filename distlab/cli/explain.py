"""`distlab explain`: what a verdict's name means, or a pasted error of torch."""

from __future__ import annotations

import difflib
import os
import stat
import sys

from distlab.cli.screen import command, show
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import TorchError, find_torch_errors

_PARTS = (
    ("happened", "What was seen"),
    ("why", "Why"),
    ("fix", "What to change"),
    ("torch", "In torch.distributed"),
)
_MOST = 1_000_000  # characters of a log that are looked at: the last ones


def explain(asked: str = "") -> int:
    """Print one explanation, or the list of all names.

    `asked` is a slug, or a text with an error of torch.distributed, gloo or NCCL.

    Raises:
        ValueError: no explanation has this name, and the text holds no error we know.
    """
    known = read_misconceptions()
    slug = asked.strip("[] \n")
    if not slug:
        show(
            [("plain", f"{name:<26} {entry['title']}") for name, entry in known.items()]
        )
        return 0
    if slug in known:
        show(_misconception(slug, known[slug]))
        return 0
    found = find_torch_errors(asked[-_MOST:])
    if not found and len(slug.split()) == 1:
        near = [name for name in known if slug in name][:3]
        near = near or difflib.get_close_matches(slug, known, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no explanation is called {slug!r}{hint}")
    if not found:
        raise ValueError(
            "this text is not among the errors that are explained here; look for the "
            "first traceback in time, of any rank, and paste its last line"
        )
    show(_torch_error(found))
    return 0


def piped() -> str:
    """What was piped or redirected into us; nothing from a terminal."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # there is no such thing
        return ""
    if not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return ""
    return sys.stdin.buffer.read().decode(errors="replace")


def _misconception(slug: str, entry: dict[str, str]) -> list[tuple[str, str]]:
    lines = [("plain", f"{slug}: {entry['title']}")]
    for key, heading in _PARTS:
        lines += _section(heading, entry[key])
    return lines


def _torch_error(found: list[TorchError]) -> list[tuple[str, str]]:
    error, *others = found
    lines = [("plain", f"{error.name}: {error.title}")]
    lines += _section("What it means", error.means)
    lines += _section("Why it is usually not the whole story", error.why)
    lines += _section("What to look at first", error.look)
    lines.append(("plain", ""))
    for name in error.see:
        is_task = name[0].isdigit()
        verb = f"hint {name}" if is_task else f"explain {name}"
        lines.append(("dim", f"  {command(verb)}"))
    if others:
        names = ", ".join(other.title for other in others[:3])
        lines.append(("dim", f"  also in this text, and likely because of it: {names}"))
    return lines


def _section(heading: str, text: str) -> list[tuple[str, str]]:
    body = [("plain", f"  {line}") for line in text.strip().splitlines()]
    return [("plain", ""), ("rule", heading), *body]
