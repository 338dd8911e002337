"""One cell with its seed: which rank, which step, and how the training is set up."""

from __future__ import annotations

import json
import os
import random
import zlib
from dataclasses import asdict, dataclass, replace

from distlab.chaos.matrix import Cell

PLAN = "DISTLAB_CHAOS"
"""The environment variable in which a rank finds its Plan, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training: 29 steps an epoch, of 48 samples each."""

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
        """What `as_json` has written; what is not in it has its default."""
        return cls(**json.loads(text))

    def as_json(self) -> str:
        """All fields, as JSON."""
        return json.dumps(asdict(self))

    def for_cell(self, cell: Cell) -> Setting:
        """What a cell needs: data workers; two nodes with a rank each; no dropout.

        Ranks draw dropout for their own samples: with other ranks the weights differ.
        """
        own = replace(self, num_workers=cell.fault.num_workers)
        if cell.is_resized:
            own = replace(own, dropout=0.0)
        nodes = cell.fault.num_nodes
        return own if nodes == 1 else replace(own, num_nodes=nodes, num_ranks=nodes)

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def num_steps(self) -> int:
        """The steps of the training."""
        return self.num_epochs * self.steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """What is to happen in a run, and to which rank; all of it is drawn from a seed."""

    fault: str
    moment: str
    rank: int
    step: int
    draw: int  # for the details: which file, which bit, which write of a save
    folder: str  # where `fired.json` is written


def plan_of(cell: Cell, setting: Setting, folder: str) -> FaultPlan:
    """The plan of a cell; the same one for the same seed."""
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
    """The environment of a run with this plan."""
    return {} if plan is None else {PLAN: json.dumps(asdict(plan))}


def plan_here() -> FaultPlan | None:
    """The plan of this process's run."""
    text = os.environ.get(PLAN, "")
    return FaultPlan(**json.loads(text)) if text else None
