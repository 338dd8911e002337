"""The checkpoints of phase 4 as DCP folders: of `distlab ddp` and distlab.distributed.

    <folder>/step-30        a DCP folder, in place of step-30.json and its shards

The ranks encode their shards as they do for our own format. Rank 0 gathers them, so it
needs memory for the whole state.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distlab.checkpoints.files import (
    JSON,
    Checkpoint,
    CheckpointError,
    Shard,
    decode_shard,
    encode_shard,
    exchange,
    exchange_bytes,
    manifest_steps,
    require_fit,
)
from distlab.checkpoints.named_run import WHOLE, named
from distlab.checkpoints.training_state import pack, random_state, unpack
from distlab.comm import Comm
from distlab.dcp.files import DcpError, is_dcp
from distlab.dcp.layout import TrainingState, load_state, save_state

BY = "run"
_BOTH = (
    "the folder would have checkpoints of both formats, and we couldn't tell which one "
    "is the newest: use another folder"
)
_NAME = re.compile(r"step-(\d+)", re.ASCII)


def to_state(checkpoint: Checkpoint) -> TrainingState:
    """Name everything in a checkpoint as torch's get_state_dict does.

    Raises:
        ValueError: there is no room for it in DCP's format; the message says why.
    """
    model, optim, shared, owns = named(*unpack(checkpoint))
    return TrainingState(
        model=model,
        optim=optim,
        step=checkpoint.step,
        epoch=shared.get("num_epochs"),
        more={"by": BY, "shared": shared, "owns": owns},
    )


def to_checkpoint(state: TrainingState) -> Checkpoint:
    """Undo `to_state`; if another program saved the state, it has no random numbers.

    Raises:
        ValueError: the state has a value that our shards can't hold.
    """
    shared, owns = {}, [{"random": random_state()}]
    if state.more.get("by") == BY:
        shared, owns = state.more["shared"], state.more["owns"]
    shared = {**shared, WHOLE: {"model": state.model, "optim": state.optim}}
    shards = []
    for rank, own in enumerate(owns):
        tensors, meta = pack(shared, own, rank, len(owns))
        try:
            require_fit(meta)
        except TypeError as error:
            raise ValueError(str(error)) from error
        shards.append(Shard(tensors, meta))
    return Checkpoint(step=state.step or 0, shards=tuple(shards))


def save_run(
    comm: Comm,
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, JSON],
    keep: int = 2,
) -> None:
    """Save what `packed` has returned on each rank as a DCP folder; collective.

    Raises:
        CheckpointError: on all ranks, if it couldn't be saved.
    """
    said, data = "", b""
    try:
        data = encode_shard(tensors, meta)
    except TypeError as error:
        said = str(error)
    errors = [f"rank {r}: {one}" for r, one in enumerate(exchange(comm, said)) if one]
    if not errors:
        every = exchange_bytes(comm, data)
        if comm.rank == 0:
            errors = _written(folder, step, every, keep)
    errors = exchange(comm, errors)[0]
    if errors:
        raise CheckpointError(f"step {step} was not saved: {'; '.join(errors)}")


def _written(folder: Path, step: int, every: list[bytes], keep: int) -> list[str]:
    """Write the folder and remove old ones; return the errors."""
    try:
        if is_dcp(folder):
            raise DcpError("the folder is a DCP checkpoint itself: name another folder")
        if folder.is_dir() and manifest_steps([path.name for path in folder.iterdir()]):
            raise DcpError(_BOTH)
        later = [one for one in steps_in(folder) if one > step]
        if later:
            raise DcpError(
                f"the folder has a checkpoint of step {later[-1]}, which a resume "
                f"would take instead of step {step}: use another folder"
            )
        shards = tuple(decode_shard(one) for one in every)
        state = to_state(Checkpoint(step=step, shards=shards))
        save_state(folder / f"step-{step}", state, replaces=True)
        for old in steps_in(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old}", ignore_errors=True)
    except (ValueError, OSError) as error:
        return [f"rank 0: {error}"]
    return []


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the DCP folders in `folder`, in ascending order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(m[1]) for m in found if m and is_dcp(folder / m[0]))


def has_dcp(folder: Path) -> bool:
    """Return True if `folder` is one of DCP's, or save_run has saved some there."""
    return is_dcp(folder) or bool(steps_in(folder))


class FromDcp:
    """The unit fault_tolerance, except that `load` reads DCP folders."""

    def __init__(self, unit: Any, folder: Path) -> None:
        self._unit, self._folder = unit, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    def load(self, disk: Any) -> Checkpoint:
        """Load the folder, or the newest in it that is complete.

        Raises:
            CheckpointError: none is complete, or there are checkpoints of both formats.
        """
        folder, refused = self._folder, []
        if manifest_steps(disk.names()):
            raise CheckpointError(_BOTH)
        if is_dcp(folder):
            return to_checkpoint(load_state(folder))
        for step in reversed(steps_in(folder)):
            try:
                found = to_checkpoint(load_state(folder / f"step-{step}"))
            except ValueError as error:
                refused.append(str(error))
                continue
            return Checkpoint(step=step, shards=found.shards, refused=tuple(refused))
        raise CheckpointError(f"no checkpoint is complete: {'; '.join(refused)}")
