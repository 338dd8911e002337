"""The concepts of the course: a text, a snippet that runs, and where to read on.

`concepts/<topic>.toml` has one table per concept. Its keys: title; asks, questions in
a learner's words; text; snippet, Python that runs alone, and prints, what it prints;
picture or command, something to look at; guide, pages as `unit#heading`; tasks;
mistakes, slugs of misconceptions; errors, names of torch errors; also, other names.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("concepts")
_LISTS = ("asks", "also", "guide", "tasks", "mistakes", "errors")


@dataclass(frozen=True, kw_only=True)
class Concept:
    """One concept; the names of its topic's file stand in `topic`."""

    name: str
    topic: str
    title: str
    text: str
    snippet: str
    prints: str
    asks: tuple[str, ...]
    also: tuple[str, ...] = ()
    guide: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    picture: str = ""
    command: str = ""


@cache
def read_concepts() -> dict[str, Concept]:
    """Every concept by its name, topic after topic."""
    return {
        name: _concept(path.stem, name, table)
        for path in sorted(FOLDER.glob("*.toml"))
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def find_concept(name: str) -> Concept | None:
    """The concept of this name, or of this other name; case and `_` do not count."""
    wanted = _plain(name)
    for concept in read_concepts().values():
        if wanted in (concept.name, *map(_plain, concept.also)):
            return concept
    return None


def _plain(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def _concept(topic: str, name: str, table: dict[str, Any]) -> Concept:
    texts = {key: table[key].strip("\n") for key in ("text", "snippet", "prints")}
    lists = {key: tuple(table.get(key, ())) for key in _LISTS}
    return Concept(name=name, topic=topic, **{**table, **texts, **lists})
