"""The checkpoints of phase 4 as two calls: one after a step, one at the start.

save_checkpoint    full_state ─▶ packed ─▶ save    a shard of each rank, then commit
load_checkpoint    load ─▶ checked ─▶ restore      the newest one that is complete
"""

from __future__ import annotations

import operator
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from distlab.checkpoints.files import CheckpointError, unfit
from distlab.checkpoints.named_run import APART, LAYOUT, NAMES, WHOLE
from distlab.checkpoints.saved_run import (
    KIND,
    expect_shared,
    packed,
    require_newest,
    resume,
)
from distlab.checkpoints.training_state import EXTRA, Run, Stateful
from distlab.comm import DiskError, RealDisk
from distlab.dcp.runs import FromDcp, has_dcp, save_run
from distlab.distributed.calls import same_call
from distlab.distributed.data_parallel import DistributedDataParallel
from distlab.distributed.group import default_comm
from distlab.distributed.model_parallel import PipelineParallel, TensorParallel
from distlab.distributed.parts import UnitError, running, unit

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
    LAYOUT,
    WHOLE,
    EXTRA,
}


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Stateful,
    *,
    keep: int = 2,
    checkpoint_format: str = "shards",
    **parts: Stateful,
) -> None:
    """Save everything that a resume needs to be bit-equal on as many ranks; collective.

    `model` may be wrapped in data parallelism or not, and `optimizer` may be any of
    torch's or the course's sharded one. Pass everything else that has a state_dict(),
    such as a scheduler, a scaler or a sampler, as `parts`. We also save each rank's
    random numbers, the state of a compression hook, and whatever modules return from
    get_extra_state().

    If a state differs between ranks, such as a position in a rank's own data, each rank
    saves its own, and only the same number of ranks can load it. As soon as the call
    returns on any rank, the checkpoint is complete. All ranks share `folder`, which
    keeps the newest `keep` checkpoints.

    With checkpoint_format="dcp", `folder` gets a folder step-<n> in the format of
    torch.distributed.checkpoint, which an FSDP2 script can load. Rank 0 then writes
    everything, so it needs memory for the whole state.

    Raises:
        CheckpointError: no rank saved anything, for example because a disk is full, a
            value is neither a tensor nor plain data, or `folder` has a complete
            checkpoint of a later step, which load_checkpoint would take. Training can
            continue, and earlier checkpoints are unchanged.
        ValueError: the model is sharded over the ranks, lazy, or on the meta device; a
            name in `parts` is reserved; `step` or `keep` is invalid; or the ranks pass
            different steps or make different calls, for instance if only rank 0 makes
            this one.

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
    same_call(comm, lambda: "save_checkpoint()")
    step, keep = _whole("step", step, 0), _whole("keep", keep, 1)
    if checkpoint_format not in ("shards", "dcp"):
        raise ValueError(
            f"checkpoint_format {checkpoint_format!r} must be shards or dcp"
        )
    run = _run(model, optimizer, parts)
    state = packed(comm, tasks, run, step=step, within=lambda: running(CheckpointError))
    if checkpoint_format == "dcp":
        save_run(comm, Path(folder), step, *state, keep)
        return
    disk: RealDisk | _NoDisk
    try:
        disk = RealDisk(folder)
        if has_dcp(Path(folder)):
            raise CheckpointError(
                "the folder has checkpoints of DCP's format: use another folder, or "
                'checkpoint_format="dcp"'
            )
        with running(CheckpointError):
            require_newest(comm, tasks, disk, step)
    except (CheckpointError, UnitError) as error:
        state = {}, unfit(str(error))  # so that `save` tells all ranks
    except (DiskError, OSError) as error:
        disk = _NoDisk(error)
    with running(CheckpointError):
        tasks.save(comm, disk, step, *state, keep)
    expect_shared(comm, disk, step)


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Stateful, **parts: Stateful
) -> int | None:
    """Load the newest checkpoint in `folder` and return its step; collective.

    Returns None if there is no checkpoint. `folder` may also be a folder in the format
    of torch.distributed.checkpoint, or contain those of save_checkpoint. Pass objects
    that you constructed in the same way as the saved ones. If a checkpoint is
    incomplete, we skip it with a warning and load the one before it. All ranks load the
    same checkpoint or none, so if this raises, no object has changed. You can load a
    checkpoint on a different number of ranks if the optimizer and all `parts` allow it.

    Raises:
        CheckpointError: there are checkpoints but none is complete, there are shards of
            several steps but no manifest, the ranks found different checkpoints, or
            another rank couldn't load it.
        ValueError: the checkpoint belongs to another model or optimizer, or lacks one
            of `parts`; or the ranks make different calls.
        DiskError: the folder can't be read.

    Example:
        init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first_step = load_checkpoint(folder, model, optimizer) or 0
        assert first_step == 0
    """
    comm, tasks = default_comm(), unit("fault_tolerance")
    same_call(comm, lambda: "load_checkpoint()")
    run = _run(model, optimizer, parts)
    if has_dcp(Path(folder)):
        tasks = FromDcp(tasks, Path(folder))
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
        warnings.warn(f"skipped a newer checkpoint: {line}", stacklevel=2)
    return found.step


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)  # accepts integers of NumPy and torch too
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} {value!r} must be a whole number from {least} on")
    return number


class _NoDisk:
    """A folder that this rank can't open, so that `save` can tell all ranks why."""

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
