"""What the ranks of `benchmarks/checkpoint.py` do: train, and save in three ways.

A stall is the time that training waits in a call of save. The three ways take turns in
the same processes, and each save has ended before the next one of another way begins.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint

from benchmarks._ratios import in_turn
from distlab.comm import RealDisk, leave_default_group
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import RankContext

dcp: Any = checkpoint
PATIENCE_S = 600.0
TENSORS = 26  # a state is in so many tensors on each rank
State = dict[str, Tensor]


def state_of(rank: int, num_bytes: int, seed: int = 0) -> State:
    """Float32 tensors of a rank, together so large."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    size = num_bytes // 4 // TENSORS
    return {
        f"layer {i}": torch.randn(size, generator=generator) for i in range(TENSORS)
    }


def unit_of(parts: dict[str, Any]) -> ModuleType:
    """The unit `fault_tolerance` as it travelled."""
    source, reference = arrived(parts["source"]), arrived(parts["reference"])
    return load_graft(source, reference, parts["grafts"])


def stalls(
    context: RankContext,
    _folder: str,
    disk: str,
    parts: dict[str, Any],
    num_bytes: int,
    rounds: int,
    planted: bool = False,
) -> list[tuple[float, ...]]:
    """For each round: the seconds of the stall of ours, of torch.save and of DCP.

    `planted`: ours waits for the disk, as a save that is not asynchronous.
    """
    unit, rank = unit_of(parts), context.rank
    state = state_of(rank, num_bytes // context.world_size)
    comm = context.comm
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group("gloo")
    saver = unit.AsyncSaver(comm, RealDisk(Path(disk) / "ours"))
    group = dist.new_group(backend="gloo")
    plain = Path(disk) / f"sync {rank}.pt"
    step = 0
    settle: Callable[[], Any] = saver.wait

    def before() -> None:
        nonlocal step
        settle()
        step += 1
        for tensor in state.values():
            tensor.add_(1.0)
        comm.barrier()

    def ours() -> None:
        nonlocal settle
        saver.save(step, state, {"rank": rank})
        settle = saver.wait
        if planted:
            saver.wait()

    def sync() -> None:
        with plain.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def peer() -> None:
        nonlocal settle
        named = {f"{rank} {name}": tensor for name, tensor in state.items()}
        settle = dcp.async_save(
            named, checkpoint_id=f"{disk}/dcp/{step % 2}", process_group=group
        ).result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first round makes buffers and files.
        found = in_turn((ours, sync, peer), rounds, warm_up=1, before=before)
        settle()
    comm.barrier()
    leave_default_group()
    return found


def saves_forever(
    context: RankContext, parts: dict[str, Any], folder: str, num_bytes: int, start: int
) -> None:
    """Save, step by step, until this process is killed; or another one, which shows."""
    unit, step = unit_of(parts), start
    comm, disk = context.comm, RealDisk(folder)
    while True:
        step += 1
        state = {"step": filled(step, num_bytes // context.world_size)}
        try:
            unit.save(comm, disk, step, state, {"step": step})
        except Exception:  # a rank is gone
            return
        context.report(step)


def filled(step: int, num_bytes: int) -> Tensor:
    """What the checkpoint of a step has, all of it the same number."""
    return torch.full((num_bytes // 8,), step, dtype=torch.int64)


def on_full_disk(
    context: RankContext, parts: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Train while the disk of the last rank has room for 64 KiB per file, then more."""
    unit, rank = unit_of(parts), context.rank
    saver = unit.AsyncSaver(context.comm, RealDisk(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    warned: list[tuple[int, str]] = []
    trained = 0
    for step in range(1, 9):
        trained += 1
        if step == 4 and rank == context.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
        try:
            saver.save(step, {"step": filled(step, 1 << 20)}, {"step": step})
            if step == 5:  # full during steps 4 and 5
                with suppress(unit.CheckpointError):
                    saver.wait()
        except unit.CheckpointError as error:
            warned.append((step, str(error)))
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saver.wait()
    return {"trained": trained, "warned": warned}
