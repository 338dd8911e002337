"""`distlab explain`: what a verdict's name means, or a pasted error of torch."""

from __future__ import annotations

import difflib
import os
import stat
import sys
from collections.abc import Iterable

from distlab.cli.screen import command, show
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.misconceptions import (
    misconceptions_by_unit,
    read_misconceptions,
)
from distlab.curriculum.torch_errors import TorchError, find_torch_errors

_PARTS = (
    ("happened", "What was seen"),
    ("why", "Why"),
    ("fix", "What to change"),
    ("torch", "In torch.distributed"),
)
_NEAR = 12  # names at most that a word brings up
_MOST = 1_000_000  # characters of a log that are looked at: the last ones


def explain(asked: str = "", *, every: bool = False) -> int:
    """Print one explanation; without a name that of the last verdict, or all names.

    `asked` is a slug, a word, or a text with an error of torch.distributed, gloo or
    NCCL.

    Raises:
        ValueError: no explanation has this name, and the text holds no error we know.
    """
    known = read_misconceptions()
    slug = asked.strip("[] \n")
    if every:
        show(_names(known))
        return 0
    if not slug:
        slug = _last_slug()
        if slug not in known:
            show([*_units(), ("dim", f"  {command('explain --all')}   every name")])
            return 0
    if slug in known:
        show(_misconception(slug, known[slug]))
        return 0
    found = find_torch_errors(asked[-_MOST:])
    if found:
        show(_torch_error(found))
        return 0
    if len(slug.split()) > 1:
        raise ValueError(
            "this text is not among the errors that are explained here; look for the "
            "first traceback in time, of any rank, and paste its last line"
        )
    near = _about(slug, known)
    if not near:
        raise ValueError(f"no explanation is called {slug!r} or mentions it")
    show([("plain", f"These explanations are about {slug!r}:"), ("plain", "")])
    show(_rows(near, known))
    return 0


def _about(word: str, known: dict[str, dict[str, str]]) -> list[str]:
    """The names that fit a word: by name, by title, by spelling, then by the text."""
    word = word.lower()
    near = [name for name in known if word in name or name in word]
    near += [name for name, entry in known.items() if word in entry["title"].lower()]
    near += difflib.get_close_matches(word, known, 3, 0.6)
    near += [name for name, entry in known.items() if word in entry["happened"].lower()]
    near += [name for name, entry in known.items() if word in entry["torch"].lower()]
    return list(dict.fromkeys(near))[:_NEAR]


def _last_slug() -> str:
    """The name of what the last check found, if it found anything."""
    kept = Progress(load_curriculum().root).read()
    last = kept.get("last", {})
    return "" if last.get("passed") else str(last.get("slug", ""))


def _units() -> list[tuple[str, str]]:
    """What there is, by unit, for who asked about nothing in particular."""
    lines = [
        ("plain", "The last check has no name to explain. Ask for a name in brackets,"),
        ("plain", "for a word such as deadlock, or paste an error of torch."),
        ("plain", ""),
    ]
    names = misconceptions_by_unit()
    lines += [("plain", f"  {unit:<28} {len(n):>3} names") for unit, n in names.items()]
    return lines


def _names(known: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for unit, names in misconceptions_by_unit().items():
        lines += [("rule", unit), *_rows(names, known), ("plain", "")]
    return lines[:-1]


def _rows(
    names: Iterable[str], known: dict[str, dict[str, str]]
) -> list[tuple[str, str]]:
    return [("plain", f"  {name:<28} {known[name]['title']}") for name in names]


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
