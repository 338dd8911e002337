"""`distlab explain`: explain a concept, a verdict's name, or an error of torch."""

from __future__ import annotations

import os
import stat
import sys

from distlab.cli.screen import command, show
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.misconceptions import (
    misconceptions_by_unit,
    read_misconceptions,
)
from distlab.tutor.answers import answer, topics
from distlab.tutor.concepts import read_concepts
from distlab.tutor.pages import Lines, rows


def explain(asked: str = "", *, every: bool = False) -> int:
    """Print an explanation (of the last verdict by default), or list all names.

    `asked` is the name of a concept or verdict, a word, a question, or text that
    contains an error from torch.distributed, gloo or NCCL.

    Raises:
        ValueError: we know neither a name nor an error in the text.
    """
    if every:
        show(_names())
        return 0
    curriculum = load_curriculum()
    if not asked.strip("[] \n"):
        asked = _last_slug()
        if asked not in read_misconceptions():
            show([*_units(), ("dim", f"  {command('explain --all')}   every name")])
            return 0
    show(answer(asked, curriculum, command))
    return 0


def _last_slug() -> str:
    """Return the name of the last check's finding, if it had one."""
    kept = Progress(load_curriculum().root).read()
    last = kept.get("last", {})
    return "" if last.get("passed") else str(last.get("slug", ""))


def _units() -> Lines:
    """List the names by unit, if nobody asked for a particular one."""
    lines = [
        (
            "plain",
            "Your last check printed no name to explain. Type a name that a verdict",
        ),
        (
            "plain",
            "shows in brackets or a word such as deadlock, ask a question in your own",
        ),
        ("plain", "words, or paste an error message from torch."),
        ("plain", ""),
        ("plain", f"  {'concepts':<28} {len(read_concepts()):>3} names"),
    ]
    names = misconceptions_by_unit()
    lines += [("plain", f"  {unit:<28} {len(n):>3} names") for unit, n in names.items()]
    return lines


def _names() -> Lines:
    concepts, known = read_concepts(), read_misconceptions()
    lines: Lines = []
    for topic, names in topics().items():
        entries = ((name, concepts[name].title) for name in names)
        lines += [("rule", f"concepts: {topic}"), *rows(entries), ("plain", "")]
    for unit, slugs in misconceptions_by_unit().items():
        entries = ((slug, known[slug]["title"]) for slug in slugs)
        lines += [("rule", unit), *rows(entries), ("plain", "")]
    return lines[:-1]


def piped() -> str:
    """Read piped or redirected input; return nothing from a terminal."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # there is no such thing
        return ""
    if not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return ""
    return sys.stdin.buffer.read().decode(errors="replace")
