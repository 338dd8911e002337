"""Checkpoints of phase 4 as two calls: one after a step, one at the start.

save_checkpoint    full_state ─▶ pack ─▶ save      a shard of each rank, then commit
load_checkpoint    load ─▶ unpack ─▶ restore       the newest one that is complete
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from distlab.comm import DiskError, RealDisk
from distlab.distributed.data_parallel import DistributedDataParallel
from distlab.distributed.group import default_comm
from distlab.distributed.model_parallel import PipelineParallel, TensorParallel
from distlab.distributed.parts import running, unit
from distlab.given import training_state
from distlab.given.checkpoint import CheckpointError
from distlab.given.training_state import Run, Stateful

_OWN_NAMES = {
    "parameters",
    "master",
    "optimizer",
    "buffers",
    "factors",
    "residuals",
    "random",
}


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Stateful,
    *,
    keep: int = 2,
    **parts: Stateful,
) -> None:
    """Save all that a resume needs: bit-equal, with the same number of ranks.

    Collective. `model` is data parallel or bare, `optimizer` any of torch's or the
    sharded one of 3.13. `parts` are what else has a state_dict(): scheduler, scaler,
    sampler. The random numbers of each rank are saved too, and what a compression hook
    keeps. When it returns on any rank, the checkpoint is complete; the newest `keep`
    stay in `folder`, which all ranks share.

    Raises:
        CheckpointError: it was not saved, on any rank: a disk is full, say. Training
            can go on, and the checkpoints before it are as they were.
        ValueError: the ranks of this model hold different parameters, or a name of
            `parts` is taken.

    Example:
        init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        save_checkpoint(folder, 7, model, optimizer)
        with torch.no_grad():
            model.module.weight.zero_()
        assert load_checkpoint(folder, model, optimizer) == 7
        assert model.module.weight.count_nonzero() == 2
    """
    comm, tasks = default_comm(), unit("fault_tolerance")
    run = _run(model, optimizer, parts)
    with running(CheckpointError):
        shared, own = tasks.full_state(run)
    packed = training_state.pack(shared, own, comm.rank, comm.world_size)
    disk: RealDisk | _NoDisk
    try:
        disk = RealDisk(folder)
    except (DiskError, OSError) as error:
        disk = _NoDisk(error)
    with running(CheckpointError):
        tasks.save(comm, disk, step, *packed, keep)


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Stateful, **parts: Stateful
) -> int | None:
    """Continue from the newest checkpoint in `folder`: its step; None: there is none.

    Every rank calls it, with objects made like those that were saved; it sends no
    message. A checkpoint that is torn is passed over, and the one before it is taken.
    Another number of ranks may load it, if the optimizer and all `parts` allow it.

    Raises:
        CheckpointError: there are checkpoints, and none of them is complete.
        ValueError: it is of another model, or without one of `parts`.
        DiskError: the folder cannot be read.

    Example:
        init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first_step = load_checkpoint(folder, model, optimizer) or 0
        assert first_step == 0
    """
    comm, tasks = default_comm(), unit("fault_tolerance")
    run = _run(model, optimizer, parts)
    with running(CheckpointError, DiskError):
        found = tasks.load(RealDisk(folder))
    if found is None:
        return None
    shared, owns = training_state.unpack(found)
    missing = sorted(set(parts) - set(shared))
    if missing:
        raise ValueError(
            f"the checkpoint of step {found.step} has no {missing[0]!r}: it was saved "
            "without it"
        )
    with running(ValueError):
        tasks.restore(run, shared, owns, comm.rank, comm.world_size)
    return int(found.step)


class _NoDisk:
    """A folder that this rank cannot open: `save` tells all ranks why."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise DiskError(str(self._error))


def _run(model: nn.Module, optimizer: Stateful, parts: dict[str, Stateful]) -> Run:
    if isinstance(model, TensorParallel | PipelineParallel):
        raise ValueError(
            f"the ranks of {type(model).__name__} hold different parameters: "
            "checkpoints are for models that are the same on all ranks"
        )
    taken = sorted(_OWN_NAMES & set(parts))
    if taken:
        raise ValueError(
            f"{taken[0]!r} is a name of the checkpoint's own: choose another"
        )
    hook = None
    if isinstance(model, DistributedDataParallel):
        hook, model = model.comm_hook, model.module
    return Run(model=model, optimizer=optimizer, parts=parts, hook=hook)
