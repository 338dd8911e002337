"""What each misconception is called, and how it is explained.

`misconceptions/<unit>.toml` has one table per slug, `shared.toml` those that several
units use: `distlab explain SLUG` prints it, and a verdict ends with its name. Five keys
each: title (at most 60 characters), happened, why, fix, torch; the lines of the last
four have at most 76 characters. `opens` is the level of the hint that fits (2: the idea
is missing, 3: a step is missing); without it, no hint does. Remarks on
torch.distributed were observed with torch 2.13 on gloo, unless they say otherwise.
"""

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


@cache
def misconceptions_by_unit() -> dict[str, tuple[str, ...]]:
    """The slugs of each unit; `shared` has those of several units."""
    return {path.stem: tuple(_table(path)) for path in _paths()}


def fitting_hint(slug: str) -> int:
    """The level of the hint that fits this misconception; 0 where none does more."""
    return int(_read().get(slug, {}).get(_OPENS, 0))


@cache
def _read() -> dict[str, dict[str, Any]]:
    return {slug: entry for path in _paths() for slug, entry in _table(path).items()}


def _paths() -> list[Path]:
    return sorted(Path(__file__).with_name("misconceptions").glob("*.toml"))


def _table(path: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
