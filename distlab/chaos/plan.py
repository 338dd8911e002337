"""Plan one cell from its seed: the rank, the step, and the setup of the training."""

from __future__ import annotations

import json
import os
import random
import zlib
from dataclasses import asdict, dataclass, replace

from distlab.chaos.matrix import Cell

PLAN = "DISTLAB_CHAOS"
"""The environment variable in which a rank finds its plan, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setup of the training, which has 29 steps per epoch with 48 samples each."""

    num_ranks: int = 3
    num_epochs: int = 2
    save_every: int = 4  # steps
    timeout_s: float = 10.0  # a rank waits so long for another one
    seed: int = 0
    num_samples: int = 1392
    global_batch_size: int = 48
    num_workers: int = 0  # data workers of each rank
    num_nodes: int = 1
    dropout: float = 0.1
    code: str = "reference"  # whose units: reference, or mine where they are written

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """Read the text of `as_json`; fields that are missing get their defaults."""
        return cls(**json.loads(text))

    def as_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self))

    def for_cell(self, cell: Cell) -> Setting:
        """Adapt the setting to a cell: data workers, two nodes, or no dropout.

        Each rank draws dropout for its own samples, so with another number of ranks the
        weights would differ. For two nodes, each has one rank.
        """
        own = replace(self, num_workers=cell.fault.num_workers)
        if cell.is_resized:
            own = replace(own, dropout=0.0)
        nodes = cell.fault.num_nodes
        return own if nodes == 1 else replace(own, num_nodes=nodes, num_ranks=nodes)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def num_steps(self) -> int:
        """The number of steps in the whole training."""
        return self.num_epochs * self.steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The fault of a run and the rank that it hits, all drawn from a seed."""

    fault: str
    moment: str
    rank: int
    step: int
    draw: int  # for the details: which file, which bit, which write of a save
    folder: str  # where `fired.json` is written


def plan_of(cell: Cell, setting: Setting, folder: str) -> FaultPlan:
    """Return the plan of a cell, which is always the same for the same seed."""
    draw = random.Random(zlib.crc32(f"{setting.seed} {cell.id}".encode()))
    workers = range(1, setting.num_ranks)
    ranks = {"worker": workers, "rank 0": [0], "any": range(setting.num_ranks)}
    # Two checkpoints are there by then, and one step at least comes after it.
    first, last = 3 * setting.save_every, setting.num_steps - setting.save_every
    steps = [*range(first, last)]
    if cell.moment == "save":
        steps = [step for step in steps if step % setting.save_every == 0]
    elif cell.moment == "epoch":
        steps = [step for step in steps if step % setting.steps_per_epoch == 0]
    return FaultPlan(
        fault=cell.fault.name,
        moment=cell.moment,
        rank=draw.choice([*ranks[cell.fault.who]]),
        step=draw.choice(steps),
        draw=draw.randrange(1 << 30),
        folder=folder,
    )


def as_variable(plan: FaultPlan | None) -> dict[str, str]:
    """Return the environment variables of a run with this plan."""
    return {} if plan is None else {PLAN: json.dumps(asdict(plan))}


def plan_here() -> FaultPlan | None:
    """Return the plan of the run that this process belongs to."""
    text = os.environ.get(PLAN, "")
    return FaultPlan(**json.loads(text)) if text else None
