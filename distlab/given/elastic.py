"""The events that a membership receives, and the actions that it decides on.

A member is a process, whose name is never used again, not even on the same node. A rank
is a number that a member has during one generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distlab.comm.services import Tick, WakeAt

# ── what happens ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Join:
    """Event: this member isn't training and waits for the next generation.

    A member sends it when it loses a peer or gets a Regroup. The message may arrive
    late, and may arrive twice.
    """

    member: str
    step: int  # the newest optimizer step that its state has
    generation: int = 0  # whose rank it was last; 0: of none, it is new


@dataclass(frozen=True)
class Lost:
    """Event: this member's process has ended, or no longer answers.

    If it hasn't ended, it may be frozen, or it may still be training behind a broken
    link.
    """

    member: str
    ended: bool = True


# ── what to do about it ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Regroup:
    """Action: tell each of these members to stop after its step and send a Join."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """Action: begin a generation, whose members all take the state of `source`."""

    generation: int
    members: dict[int, str]  # rank → member
    source: str
    grad_accum_steps: int  # of each rank, in a step of the global batch


@dataclass(frozen=True)
class Refuse:
    """Action: turn this member away; it ends, or joins again as a new process."""

    member: str
    reason: str


@dataclass(frozen=True)
class Stop:
    """Action: end the job for this reason; no action follows."""

    reason: str


Event = Join | Lost | Tick
Action = Regroup | Form | Refuse | WakeAt | Stop
"""`WakeAt(at_s)` asks for one `Tick` at that time, and a later one replaces it."""


# ── an epoch of 24 samples on 4, then 2, then 3 ranks ───────────────────────────────

Resplit = Callable[..., list[list[list[int]]]]
"""4.8 as a function of the order, global batch size, history and world size."""
NUM_SAMPLES, GLOBAL_BATCH_SIZE = 24, 4
STAGES = ((4, 2), (2, 2), (3, 2))  # world sizes, and the steps that are made there


def mosaic(resplit: Resplit) -> list[str]:
    """Show the samples of each step, with a line for each rank of each world size."""
    lines: list[str] = []
    history: list[list[int]] = []
    for world_size, steps in STAGES:
        plan = resplit(range(NUM_SAMPLES), GLOBAL_BATCH_SIZE, history, world_size)
        lines.append(f"{world_size} ranks")
        for rank, shard in enumerate(plan):
            cells = [" ".join(f"{i:2}" for i in batch) for batch in shard[:steps]]
            lines.append(f"  rank {rank}   " + " | ".join(f"{c:5}" for c in cells))
        history.append([steps] * world_size)
    return lines
