"""Checks of 4.3, C3: what can be loaded after a crash at any moment."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from distlab.comm import Disk
from distlab.grading.checks.fault_tolerance.disks import (
    complete_steps,
    files_of_step,
    flaw_of,
    when,
)
from distlab.grading.checks.fault_tolerance.save import (
    KEEP,
    PLAYED,
    SIZES,
    TASK,
    early_return,
    save_steps,
    saves,
    the_manifest_comes_last,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.again import played_once
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY
from distlab.sim import crash_points

FIRST = 1  # is there before; as text, too, it is older than those that are saved


@played_once
def crash_saves(context: RankContext, unit: ModuleType, seed: int, keep: int) -> Any:
    """The first crash after which less can be loaded than `keep` promises."""
    size = 2
    before = files_of_step(FIRST, size, seed)

    def program(disk: Disk, tell: Callable[[Any], None]) -> None:
        saves(unit, seed, size, [], disk, tell, keep)

    for point in crash_points(program, files=before, limit=40):
        saved = {FIRST, *(step for _, step in point.told)}
        complete = complete_steps(point.files)
        is_old = not complete or complete[0] < max(saved)
        if is_old or len(complete) < min(keep, len(saved)):
            return {
                "when": when(point),
                "told": [list(one) for one in point.told],
                "complete": complete,
                "flaw": flaw_of(point.files, max(saved)),
            }
    return None


KEEPS = (1, KEEP)
CRASHED = [on_ranks(crash_saves, keep=keep) for keep in KEEPS]


@clause(TASK, "C3", worlds=(1,), plays=SIZES, runs=[*PLAYED, *CRASHED])
def complete_when_it_returns(runs: Runs) -> str | None:
    """When ranks return; at every crash, the newest complete checkpoint."""
    for size in SIZES:
        record = worked_out(runs, save_steps, size=size).values[0]
        if (row := early_return(record["rows"])) is not None:
            raise NotYetError(
                f"with {size} ranks, save of step {row[2]} returned on rank {row[0]} "
                "before the manifest was durable, expected every rank to wait for it",
                slug="returned-before-commit",
                rule="no rank may return before it has heard that the manifest is "
                "durable",
                played=size,
            )
    with judged_after(the_manifest_comes_last, runs, "C2"):
        for keep in KEEPS:
            if wrong := worked_out(runs, crash_saves, keep=keep).values[0]:
                _raise_loss(wrong, keep)
    return "at every crash of the disk while two ranks save three times"


def _raise_loss(wrong: dict[str, Any], keep: int) -> None:
    """Nothing can be loaded, or something older, or less than what was promised."""
    newest = f"step {FIRST}, which was saved before"
    if wrong["told"]:
        rank, step = max(wrong["told"], key=lambda one: one[1])
        newest = f"step {step}, as its save had returned on rank {rank}"
    crashed = f"with keep={keep}, a crash {wrong['when']} leaves"
    complete = wrong["complete"]
    rule = "remove older checkpoints when the manifest of the new one is durable"
    if not complete:
        raise NotYetError(
            f"{crashed} no complete checkpoint, expected {newest}",
            evidence=[(NOBODY, "disk", wrong["flaw"])],
            slug="last-good-removed",
            rule=rule,
        )
    if not wrong["flaw"]:
        raise NotYetError(
            f"{crashed} only step {complete[0]} complete, expected the newest {keep} "
            "steps",
            rule=rule,
        )
    raise NotYetError(
        f"{crashed} step {complete[0]} as the newest complete one, expected {newest}",
        evidence=[(NOBODY, "disk", wrong["flaw"])],
    )
