"""How a path is shown to a person."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: Path | str) -> str:
    """A path as one would type it from here: relative, unless it is far away."""
    absolute = str(path)
    relative = os.path.relpath(absolute)
    return relative if relative.count("..") <= 2 else absolute
