"""What a program is handed in each rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distlab.comm import Clock, Comm, Disk, Endpoint, RealClock, Store, Traffic
from distlab.runner.gpus import are_hidden


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank's surroundings.

    `comm` writes a journal and counts its bytes into `traffic`. `report` sends a value
    to the parent at once, while the program goes on. `clock.sleep` stands for compute
    where time is virtual. Of all that a rank has, only its disk outlives its process:
    one that is started again finds its files, and the others' `comm` without it.
    """

    comm: Comm
    traffic: Traffic
    report: Callable[[Any], None]
    clock: Clock = field(default_factory=RealClock)
    store: Store | None = None
    endpoint: Endpoint | None = None
    disk: Disk | None = None

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """How many ranks run."""
        return self.comm.world_size


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators of this process."""
    random.seed(seed)
    if are_hidden():
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # notes each kind of device for later, with a traceback
