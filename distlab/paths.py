"""Paths: how one is shown to a person, and what lies above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def shown(path: Path | str) -> str:
    """A path as one would type it from here: relative, unless it is far away."""
    absolute = str(path)
    relative = os.path.relpath(absolute)
    return relative if relative.count("..") <= 2 else absolute


def parents_of(path: str) -> Iterator[str]:
    """The folders above an absolute path, innermost first: Path's `parents`, faster."""
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above
