"""The first half of `distlab demo --phase 4`: find three faults in records.

64 ranks are simulated. One is slow, a replica differs in one weight, and a rank's
gradient gets a nan. We draw the ranks again each time. Times are virtual.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, show, show_json, warn

if TYPE_CHECKING:  # they import torch, and the first line should not wait for it
    from distlab.curriculum.choose import Choice
    from distlab.walkthroughs.phase4 import Search

NUM_RANKS, NUM_STEPS, FACTOR = 64, 6, 2.0
TASKS = ("monitoring.step_report", "monitoring.suspects")
_IN_A_ROW = 8
_WHAT = {
    "stragglers": "the slow rank",
    "desynchronized": "the replica that differs",
    "nan_origin": "where the nan came from",
}


def demo_monitor(
    *, code: str = "reference", as_json: bool = False, seed: int | None = None
) -> int:
    """Hide faults and search; 0 if all are found, 1 if not, 11 if the ranks fail.

    Raises:
        ValueError: we can't read the file `code`.
    """
    exit_code, data = search(code=code, quiet=as_json, seed=seed)
    if as_json and data:
        show_json(data)
    return exit_code


def search(
    *, code: str, quiet: bool, seed: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Run `demo_monitor`; return the exit code and the findings."""
    if not quiet:
        lines = (
            f"{NUM_RANKS} simulated ranks train together. One of them takes twice as",
            "long as the others. Which one is it? No rank can tell by itself, but each",
            "one records a few numbers.",
            "",
        )
        show([("plain", line) for line in lines])
    from distlab.ranks import new_cluster
    from distlab.runner import RunnerError
    from distlab.walkthroughs import phase4, phase4_rank

    try:
        choice = _chosen(code)
    except _UnfinishedError as error:
        warn(f"{error}; run `{command('check --phase 4')}` to see what's missing")
        return 1, {}
    seed = random.randrange(1 << 30) if seed is None else seed
    with new_cluster(preload=(phase4_rank.__name__,)) as cluster:
        try:
            done = phase4.search(
                cluster,
                choice,
                n=NUM_RANKS,
                factor=FACTOR,
                num_steps=NUM_STEPS,
                seed=seed,
            )
        except RunnerError as error:
            warn(f"the ranks did not finish: {error}")
            return (11 if code == "reference" else 1), {}
    found = done.named == done.faults
    if not quiet:
        _tell(done, is_own=code == "mine")
    return int(not found), {"code": code, "faults": done.faults, "named": done.named}


class _UnfinishedError(Exception):
    """You asked for your own code, but a task isn't written yet."""


def _chosen(code: str) -> Choice:
    from distlab.curriculum import load_curriculum, naming_file, read_source
    from distlab.curriculum.choose import Choice, chosen_unit

    curriculum = load_curriculum()
    if code == "mine":
        choice = chosen_unit(curriculum, "monitoring", "mine")
        for part in choice.parts:
            is_lent = part.whose == "reference" and part.why != "as set"
            if part.task in TASKS and is_lent:
                raise _UnfinishedError(
                    f"you haven't written {part.number} {part.task} yet"
                )
        return choice
    unit = curriculum.units["monitoring"]
    with naming_file():
        source = read_source(curriculum, unit, code)
        source.tree  # noqa: B018 - to see here, and not on each rank, if it is Python
    reference = read_source(curriculum, unit, "reference")
    return Choice(source=source, reference=reference, grafts=(), parts=())


def _tell(done: Search, *, is_own: bool) -> None:
    waits = [ms[2] for ms in done.ms]
    own = [ms[0] + ms[1] for ms in done.ms]
    lines = [
        f"  On rank 0, a step takes {sum(done.ms[0]):.0f} ms, and "
        f"{waits[0]:.0f} ms of that is communication.",
        "",
        "  communication on each rank, in ms",
        *_grid(waits),
        "",
    ]
    shortest = waits.index(min(waits))
    lines += [
        f"  Rank {shortest} spends the least time on communication, because it comes "
        "last and the",
        f"  others wait for it. Its own work takes {own[shortest]:.0f} ms, while "
        f"theirs takes {sorted(own)[len(own) // 2]:.0f} ms.",
        "",
    ]
    show([("plain", line) for line in lines])
    for field, what in _WHAT.items():
        right = done.named[field] == done.faults[field]
        told = ", ".join(map(str, done.named[field])) or "none"
        was = "" if right else f"   it was {done.faults[field][0]}"
        show([("pass" if right else "fail", f"  {what:<26} rank {told}{was}")])
    if is_own and done.named == done.faults:
        show([("", ""), ("pass", "  ◆ Your own code found all three.")])


def _grid(values: Sequence[float]) -> list[str]:
    rows = []
    for start in range(0, len(values), _IN_A_ROW):
        cells = "".join(f"{value:7.1f}" for value in values[start : start + _IN_A_ROW])
        rows.append(f"  {start:>3} …{cells}")
    return rows
