"""Save checkpoints with torch's own functions: torch.distributed.checkpoint (DCP).

Guide: phase4_production/guide/checkpoint_port.md.
Source: torch.distributed.checkpoint of torch 2.13.
Symbols: n = dist.get_world_size().
Cost: a save stops training for one copy of the state in memory.

There is no comm in this file, because everything goes through torch's process groups.

    4.3    shards, then a manifest          dcp.save: shards, then .metadata
    4.4    the newest one that is complete  your choice of folder, then dcp.load
    4.5    the state of every rank          one name for each rank
    4.13   a copy, written in background    dcp.async_save, process_group=…
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

dcp: Any = checkpoint

# ── 4.17 a checkpoint that is written while training goes on ────────────────────────


def own_name() -> str:
    """Return the name under which this rank stores a tensor that only it has.

    Given: DCP stores one tensor per name. A plain tensor with the same name on several
    ranks counts as a copy, and one rank writes it.

    Clause C2 of Saver needs it.
    Example: rank 3 has another name than rank 0, on any number of ranks
    """
    # TODO(checkpoint_port.saver)
    # what is different on each rank?
    raise NotImplementedError("checkpoint_port.saver")


class Saver:
    """Writes checkpoints to `folder`, which all ranks share, while training continues.

    Collective: every rank makes one, and calls save() and wait() in the same order.

    C1 A model that runs on fewer or more ranks can load the weights and the optimizer
       state and continue.
    C2 Each rank gets its own tensor back. A rank that didn't exist when the checkpoint
       was saved keeps the tensor that it has.
    C3 save() returns as soon as it has copied this rank's shards, and it sends all
       later messages through a separate process group.
    C4 The next save() waits for the previous one to finish. If the previous one failed,
       it raises the error exactly once.
    C5 load() loads the highest complete step and returns its number.
    In torch.distributed: dcp.async_save(…, process_group=…)
    Example: save(10, …) returns; step 11 trains; save(20, …) waits until 10 is written
    Cost: one copy of this rank's shards. Check: distlab check 4.17
    """

    def __init__(self, folder: str) -> None:
        """Given: torch's default process group, with a CPU backend (gloo)."""
        self.folder = folder
        # TODO(checkpoint_port.saver)
        # what does a thread send while training sends, too? It needs its own group.
        raise NotImplementedError("checkpoint_port.saver")

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, own: Tensor
    ) -> None:
        """Begin to write the state after `step`.

        Given: `step` is larger each time. `model` was sharded with fully_shard. `own`
        is another tensor on each rank, with the same shape, such as the state of its
        random generator.

        Raises the error of the last save, if it failed.
        """
        # TODO(checkpoint_port.saver)
        # the last save first.
        # a new folder for each step: a save that fails then destroys nothing.
        # `own` goes into the same dict, under own_name().
        raise NotImplementedError("checkpoint_port.saver")

    def wait(self) -> None:
        """Return when the last save is complete, or raise its error."""
        # TODO(checkpoint_port.saver)
        # async_save returned a future. An error is raised once.
        raise NotImplementedError("checkpoint_port.saver")


def load(
    folder: str, model: nn.Module, optimizer: Optimizer, own: Tensor
) -> int | None:
    """Load model, optimizer and `own` in place; return the step, or None without one.

    Given: `model` is sharded over the present ranks, whose number may have changed.
    `folder` holds nothing else, and it may not exist. If it exists but can't be listed,
    raise OSError, because after None the training would start over at step 0. A save
    that failed or was killed has left some of its files but no `.metadata`, which DCP
    writes last.

    The clauses are those of Saver.
    In torch.distributed: dcp.load, FileSystemReader(…).read_metadata()
    Example: steps 10 and 20 are complete, 30 is not: 20
    Cost: each rank reads its own shards. Check: distlab check 4.17
    """
    # TODO(checkpoint_port.saver)
    # which folders are complete? which of two steps is the larger one?
    # dcp.load fails if it is asked for a name that was not saved:
    # read_metadata().state_dict_metadata has the names
    raise NotImplementedError("checkpoint_port.saver")
