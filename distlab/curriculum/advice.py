"""Where to look when a clause fails and no known mistake fits the failure.

`advice.toml` has one line for each clause of phases 3b and 4, and `standing` those for
the clauses that every task has. The grader says it where a check has neither a slug nor
a rule: so it is true of every solution that fails the clause.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

STANDING = "standing"


@cache
def read_advice() -> dict[str, dict[str, str]]:
    """By task id, or `STANDING`, the line of each clause."""
    path = Path(__file__).with_name("advice.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def advice_on(task: str, clause: str) -> str:
    """What to look at when this clause of a task fails; "" where nothing is said."""
    table = read_advice()
    own = table.get(task, {}).get(clause, "")
    return own or table[STANDING].get(clause, "")
