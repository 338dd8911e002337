"""Checkpoints of phase 4 as two calls: one after a step, one at the start.

save_checkpoint    full_state ─▶ packed ─▶ save    a shard of each rank, then commit
load_checkpoint    load ─▶ checked ─▶ restore      the newest one that is complete
"""

from __future__ import annotations

import operator
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from distlab.comm import DiskError, RealDisk
from distlab.distributed.data_parallel import DistributedDataParallel
from distlab.distributed.group import default_comm
from distlab.distributed.model_parallel import PipelineParallel, TensorParallel
from distlab.distributed.parts import running, unit
from distlab.given.checkpoint import CheckpointError
from distlab.given.saved_run import APART, KIND, NAMES, expect_shared, packed, resume
from distlab.given.training_state import EXTRA, Run, Stateful

_OWN_NAMES = {
    "parameters",
    "master",
    "optimizer",
    "buffers",
    "factors",
    "residuals",
    "random",
    APART,
    NAMES,
    KIND,
    EXTRA,
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
    sampler. The random numbers of each rank are saved too, what a compression hook
    keeps, and what modules return from get_extra_state(). State that differs between
    the ranks, such as a position in a rank's own data, is saved for each of them, and
    then only as many ranks can load it. When it returns on any rank, the checkpoint is
    complete; the newest `keep` stay in `folder`, which all ranks share.

    Raises:
        CheckpointError: it was not saved, on any rank: a disk is full, or a state has a
            value that is no tensor and no plain data. Training can go on, and the
            checkpoints before it are as they were.
        ValueError: the model is sharded over the ranks, or lazy, or on the meta device;
            a name of `parts` is taken; `step` or `keep` can't be, or the ranks have
            different steps.

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
    step, keep = _whole("step", step, 0), _whole("keep", keep, 1)
    run = _run(model, optimizer, parts)
    state = packed(comm, tasks, run, step=step, within=lambda: running(CheckpointError))
    disk: RealDisk | _NoDisk
    try:
        disk = RealDisk(folder)
    except (DiskError, OSError) as error:
        disk = _NoDisk(error)
    with running(CheckpointError):
        tasks.save(comm, disk, step, *state, keep)
    expect_shared(comm, disk, step)


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Stateful, **parts: Stateful
) -> int | None:
    """Continue from the newest checkpoint in `folder`: its step; None: there is none.

    Collective, with objects made like those that were saved. A checkpoint that is torn
    is passed over with a warning, and the one before it is taken. All ranks take the
    same one, or none: when this raises, what they have is as it was. Another number of
    ranks may load it, if the optimizer and all `parts` allow it.

    Raises:
        CheckpointError: there are checkpoints, and none of them is complete; the ranks
            found different ones; another rank could not load it.
        ValueError: it is of another model or optimizer, or without one of `parts`.
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
    found = resume(
        comm,
        tasks,
        lambda: RealDisk(folder),
        run,
        within=lambda: running(CheckpointError, DiskError, ValueError),
    )
    if found is None:
        return None
    for line in found.refused:
        warnings.warn(f"a newer checkpoint was not taken: {line}", stacklevel=2)
    return found.step


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)  # also NumPy's and torch's
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} {value!r} must be a whole number from {least} on")
    return number


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
