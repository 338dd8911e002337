"""A small change to the text of a function's body, as pairs of old and new text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def with_changes(body: str, pairs: Iterable[Sequence[str]]) -> str:
    """The body after each pair's old text has become its new text, in order.

    The lines after the first of a text that has several are indented as the line in
    which the old text begins, and by what they have of their own. A line that a
    change leaves empty is left out.

    Raises:
        ValueError: an old text is not there exactly once; the message is one clause.
    """
    for old, new in pairs:
        found = list(_places_of(old).finditer(body))
        if len(found) != 1:
            raise ValueError(f"{old!r} is there {len(found)} times")
        (match,) = found
        start, end = match.span("old")
        body = body[:start] + _indented(new, _indent_at(body, start)) + body[end:]
    return "\n".join(line for line in body.splitlines() if line.strip())


def _places_of(old: str) -> re.Pattern[str]:
    head, *rest = old.split("\n")
    if not rest:
        return re.compile(f"(?P<old>{re.escape(head)})")
    lines = ["\n" + (f"(?P=indent){re.escape(line)}" if line else "") for line in rest]
    text = re.escape(head) + "".join(lines)
    return re.compile(rf"(?m)^(?P<indent> *).*?(?P<old>{text})")


def _indent_at(body: str, place: int) -> str:
    line = body[body.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip(" "))]


def _indented(text: str, indent: str) -> str:
    head, *rest = text.split("\n")
    return "\n".join([head, *(indent + line if line else line for line in rest)])
