"""What each misconception is called, and how it is explained."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


@cache
def read_misconceptions() -> dict[str, dict[str, str]]:
    """Every slug with its title, happened, why, fix and torch."""
    path = Path(__file__).with_name("misconceptions.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
