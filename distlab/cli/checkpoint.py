"""`distlab checkpoint SOURCE TARGET`: convert a checkpoint to torch's DCP, or back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from distlab.checkpoints.files import (
    CheckpointError,
    Manifest,
    encode_manifest,
    encode_shard,
    manifest_name,
    manifest_steps,
    record_of,
)
from distlab.cli.screen import show, show_json
from distlab.comm import DiskError, RealDisk
from distlab.dcp import TrainingState, is_dcp, load_state, save_state
from distlab.dcp.runs import BY as RUN
from distlab.dcp.runs import steps_in, to_checkpoint, to_state
from distlab.distributed.parts import unit
from distlab.engines import dcp_state, saving

PROGRAMS = ("train", "ddp", "library")


def checkpoint(
    source: Path, target: Path | None, *, program: str, as_json: bool
) -> int:
    """Show what a checkpoint contains, or convert it.

    Raises:
        ValueError: the source is no checkpoint or is damaged, the target has something
            already, or the state doesn't fit the other format.
    """
    if program and program not in PROGRAMS:
        raise ValueError(f"--for {program}: choose {', '.join(PROGRAMS)}")
    if target is not None:
        _require_free(target)
    folder = _dcp_in(source)
    state = load_state(folder) if folder else _own(source)
    said = _about(state) | {"source": str(folder or source)}
    said["format"] = "dcp" if folder else "distlab"
    if target is not None:
        written = _write(state, target, program) if folder else _to_dcp(state, target)
        said["written"] = str(written)
    if as_json:
        show_json(said)
        return 0
    lines = [f"{said['source']}  step {said['step']}, epoch {said['epoch']}"]
    lines += [f"  model      {said['tensors']:,} tensors, {said['numbers']:,} numbers"]
    lines += [f"  optimizer  {said['optimizer']:,} parameters with state"]
    if target is not None:
        lines += [f"wrote {said['written']}"]
    show([("", line) for line in lines])
    return 0


def _require_free(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists already: name a new folder")


def _dcp_in(source: Path) -> Path | None:
    """Return the DCP folder, or the newest of those that distlab has saved there."""
    if is_dcp(source):
        return source
    steps = steps_in(source)
    if steps:
        return source / f"step-{steps[-1]}"
    found = saving.saved_in(source) if source.is_dir() else []
    return found[0] if found and is_dcp(found[0]) else None


def _about(state: TrainingState) -> dict[str, Any]:
    tensors = [v for v in state.model.values() if isinstance(v, torch.Tensor)]
    return {
        "step": state.step,
        "epoch": state.epoch,
        "tensors": len(tensors),
        "numbers": sum(tensor.numel() for tensor in tensors),
        "optimizer": len(state.optim["state"]),
    }


# ── reading distlab's own formats ───────────────────────────────────────────────────


def _own(source: Path) -> TrainingState:
    if not os.path.lexists(source):
        raise ValueError(f"there is no {source}")
    if source.is_file():
        return dcp_state.to_state(saving.load(source, None) or {})
    names = os.listdir(source)
    if manifest_steps(names):
        try:
            found = unit("fault_tolerance").load(RealDisk(source))
        except (CheckpointError, DiskError) as error:
            raise ValueError(f"{source}: {error}") from error
        return to_state(found)
    if saving.saved_in(source):
        loaded = saving.load(True, source)
        assert loaded is not None
        return dcp_state.to_state(loaded)
    raise ValueError(
        f"{source} has no checkpoint, such as epoch_0001.pt, step-1.json or .metadata"
    )


# ── writing ─────────────────────────────────────────────────────────────────────────


def _to_dcp(state: TrainingState, target: Path) -> Path:
    if target.is_dir():
        target.rmdir()  # it is empty
    return save_state(target, state)


def _write(state: TrainingState, target: Path, program: str) -> Path:
    by = state.more.get("by")
    if not program and by is None:
        raise ValueError(
            "distlab didn't save this folder, so say what is to load it: --for train "
            "or --for library"
        )
    if program == "train" or (not program and by == dcp_state.BY):
        loaded = dcp_state.from_state(state)
        return saving.save(target, state.epoch or 0, loaded)
    if program == "ddp" and by != RUN:
        raise ValueError(
            "`distlab ddp` can only continue what it has saved itself: choose --for "
            "train or --for library"
        )
    found = to_checkpoint(state)
    disk, write_file = RealDisk(target), unit("fault_tolerance").write_file
    records = []
    for rank, shard in enumerate(found.shards):
        data = encode_shard(shard.tensors, shard.meta)
        records.append(record_of(data, found.step, rank))
        write_file(disk, records[-1].name, data)
    manifest = Manifest(step=found.step, files=tuple(records))
    write_file(disk, manifest_name(found.step), encode_manifest(manifest))
    return target / manifest_name(found.step)
