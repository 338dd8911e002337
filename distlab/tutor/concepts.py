"""Read the concepts of the course: a text, a snippet that runs, and where to read on.

`concepts/<topic>.toml` has one table per concept, with these keys:

- `title` and `text`;
- `asks`, questions in a learner's words, and `also`, other names of the concept;
- `snippet`, Python that runs by itself, and `prints`, its output;
- `picture` or `command`, something to look at;
- `guide`, pages as `unit#heading`, and `tasks`;
- `mistakes`, slugs of misconceptions, and `errors`, names of torch errors.
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
    """One concept. `topic` is the name of its file."""

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
    """Return every concept by its name, topic after topic."""
    return {
        name: _concept(path.stem, name, table)
        for path in sorted(FOLDER.glob("*.toml"))
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def find_concept(name: str) -> Concept | None:
    """Find a concept by one of its names, ignoring case and `_`."""
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
