"""Makes Markdown of our docstrings: examples and small tables become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Examples?:\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_ROWS = re.compile(
    r"(?:^[\w/.*][^\n]*?\S {2,}\S.*\n(?:^ {2,}\S.*\n)*){2,}", re.MULTILINE
)


class AsMarkdown(griffe.Extension):
    """Rewrites each docstring after it has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, a class or a function."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring in which Markdown shows what the terminal shows."""
    text = _ROWS.sub(lambda rows: f"\n```text\n{rows[0]}```\n\n", f"{text}\n")

    def example(found: re.Match[str]) -> str:
        lines = [line[4:] for line in found[1].rstrip().splitlines()]
        return "\n```python\n" + "\n".join(lines) + "\n```\n\n"

    return _EXAMPLE.sub(example, text).rstrip()
