"""What each misconception is called, and how it is explained."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_OPENS = "opens"


@cache
def read_misconceptions() -> dict[str, dict[str, str]]:
    """Every slug with its title, happened, why, fix and torch."""
    return {
        slug: {key: text for key, text in entry.items() if key != _OPENS}
        for slug, entry in _read().items()
    }


def fitting_hint(slug: str) -> int:
    """The level of the hint that fits this misconception; 0 where none does more."""
    return int(_read().get(slug, {}).get(_OPENS, 0))


@cache
def _read() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("misconceptions.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
