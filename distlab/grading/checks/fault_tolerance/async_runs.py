"""What ranks do in 4.13, `fault_tolerance.async_save`: saves that are held up.

Each rank has a disk of its own, whose operations in a thread wait while it is held up.
So what a save does before it returns, and what later, does not depend on time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoints import files as given
from distlab.grading.checks.fault_tolerance.disks import same_tensor, tensors_of
from distlab.grading.checks.fault_tolerance.held import (
    OVER_S,
    Broken,
    HeldDisk,
    Started,
    WatchedDict,
    WatchedList,
    WatchedTensor,
    gated,
    on_all,
    watched,
)
from distlab.runner import RankContext
from distlab.sim import SimDisk

KEPT = (3, 1)
SAVED = (10, 20, 30, 40)


class OddError(Exception):
    """An error of no known kind."""


ERRORS: tuple[type[Exception], ...] = (ConnectionResetError, OddError, MemoryError)


def save_and_train(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A save while the disk is held up, and training goes on; then two more."""
    disk, rank = HeldDisk(), context.rank
    saver, started = unit.AsyncSaver(context.comm, disk), Started()
    wanted = [tensors_of(rank, 1, seed), tensors_of(rank, 2, seed), _others(rank)]
    metas: list[dict[str, Any]] = [{"seen": [1, 2]}, {"seen": [3]}, {"seen": []}]
    flaws: list[str] = []
    WatchedTensor.was_read_later = False
    with gated() as gate:
        disk.hold()
        gate.hold()
        for step, (right, right_meta) in enumerate(zip(wanted, metas, strict=True), 1):
            tensors = watched(right)
            meta = WatchedDict(seen=WatchedList(right_meta["seen"]))
            saver.save(step, tensors, meta)
            if step == 1:
                waits = disk.was_in_main or disk.was_waited_for or gate.was_waited_for
                total = torch.ones(3)
                context.comm.all_reduce(total)  # training's messages travel meanwhile
            _change(tensors, meta)
            disk.free()
            gate.free()
            saver.wait()
            started.settle()
            flaws.append(_flaw(_shard(disk, step, rank), right, right_meta))
            if step == 2:
                names = disk.names()
    return {
        "waits": waits,
        "read_later": WatchedTensor.was_read_later,
        "flaws": flaws,
        "manifests": [name for name in names if name.endswith(".json")],
    }


def _others(rank: int) -> dict[str, Tensor]:
    """As an optimizer's state: some are new, gone, larger, or of another dtype."""
    more = {"mask": torch.ones(5, 2) > 0, "count": torch.tensor(2.5)}
    return {"momentum": torch.full((2, 3), rank + 1.0), **more}


def _change(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """What an optimizer's step does: the values change in place."""
    for tensor in tensors.values():
        plain = tensor.as_subclass(torch.Tensor)
        plain.copy_(torch.zeros_like(plain))
    meta["seen"].append(99)


def _shard(disk: SimDisk, step: int, rank: int) -> Any:
    """This rank's shard of a step, or None."""
    for name, data in disk.files.items():
        if given.step_of(name) == step and f".rank-{rank}." in name:
            return given.decode_shard(data)
    return None


def _flaw(shard: Any, tensors: dict[str, Tensor], meta: Any) -> str:
    """What is wrong with a shard."""
    if shard is None:
        return "has no shard, expected one"
    if shard.tensors.keys() != tensors.keys():
        odd = sorted(shard.tensors.keys() ^ tensors.keys())
        return f'has other tensors than were saved, such as "{odd[0]}"'
    for name, tensor in tensors.items():
        found = shard.tensors[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            return f'has "{name}" with another shape or dtype, expected the same'
        if not same_tensor(found, tensor):
            later = not found.any() and bool(tensor.any())
            values = "the values of later" if later else "other values"
            return f'has "{name}" with {values}, expected those that were saved'
    return "" if shard.meta == meta else f"has meta {shard.meta}, expected {meta}"


def save_again(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A save is called while the one before has not yet read its copies."""
    disk, rank = SimDisk(), context.rank
    saver, started = unit.AsyncSaver(context.comm, disk), Started()
    wanted = [_weights(rank, step) for step in (1, 2)]
    with gated() as gate:
        gate.hold()
        saver.save(1, wanted[0], {"step": 1})
        started.watch()
        started.free_when_joined(gate)
        saver.save(2, wanted[1], {"step": 2})
        started.settle()
        saver.wait()
        started.settle()
    shards = [_shard(disk, step, rank) for step in (1, 2)]
    is_second = shards[0] is not None and not _flaw(shards[0], wanted[1], {"step": 1})
    return {
        "two": gate.has_two,
        "is_second": is_second,
        "flaw": _flaw(shards[0], wanted[0], {"step": 1}) if shards[0] else "",
    }


def _weights(rank: int, step: int) -> dict[str, Tensor]:
    return {"weight": torch.full((4, 3), 10.0 * step + rank)}


def save_in_turn(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Two saves one after the other, and errors of a full disk on the last rank."""
    disk, rank = HeldDisk(), context.rank
    saver = unit.AsyncSaver(context.comm, disk)
    tensors = tensors_of(rank, 1, seed)
    disk.hold()
    saver.save(1, tensors, {})
    before: list[int] = []

    def free_later() -> None:
        before.extend(disk.steps)
        if 2 not in before:
            disk.free()

    timer = threading.Timer(0.1, free_later)
    timer.start()
    saver.save(2, tensors, {})
    timer.join()
    if 2 in before:
        return {"two": True}
    saver.wait()
    if not on_all(context, 2 in disk.steps):
        return {"two": False, "skipped": True}
    if rank == context.world_size - 1:
        disk.full = "step-3."
    said = [_said(lambda: saver.save(3, tensors, {}))]
    said += [_said(lambda: saver.save(4, tensors, {}))]
    said += [_said(saver.wait)]
    said += [_said(lambda: saver.save(5, tensors, {}))]
    if rank == context.world_size - 1:
        disk.full = "step-6."
    said += [_said(lambda: saver.save(6, tensors, {})), _said(saver.wait)]
    said += [_said(saver.wait), _said(lambda: saver.save(7, tensors, {}))]
    said += [_said(saver.wait)]
    missing = [step for step in (5, 7) if step not in disk.steps]
    has_4 = 4 in disk.steps
    told = {"two": False, "skipped": False, "said": said, "has_4": has_4}
    return {**told, "missing": missing}


def _said(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return str(error)
    return ""


def wait_for_the_end(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """wait() is called while the disk is held up, for longer than any time limit."""
    disk = HeldDisk()
    saver, started = unit.AsyncSaver(context.comm, disk), Started()
    disk.hold()
    saver.save(1, tensors_of(context.rank, 1, seed), {})
    started.watch()
    is_free = started.free_when_joined(disk)
    said = _said(saver.wait)
    is_early = not is_free.is_set()
    disk.free()
    started.settle()
    return {"is_early": is_early, "said": said}


def lose_messages(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A save whose messages fail on all ranks, with errors that are no CheckpointError.

    The thread has ended when the next call comes.
    """
    disk, rows = SimDisk(), list[dict[str, Any]]()
    saver, started = unit.AsyncSaver(context.comm, disk), Started()
    saver.comm = broken = Broken(saver.comm)
    tensors = tensors_of(context.rank, 1, seed)
    for number, kind in enumerate(ERRORS):
        text = f"message {number} was lost"
        broken.error = kind(text)
        broken.has_failed.clear()
        saver.save(10 * number + 1, tensors, {})
        failed = broken.has_failed.wait(OVER_S)
        started.settle()
        broken.error = None
        step = 10 * number + 2
        by_wait = number % 2 == 0
        act = saver.wait if by_wait else lambda s=step: saver.save(s, tensors, {})
        row: dict[str, Any] = {
            "kind": kind.__name__,
            "call": "wait()" if by_wait else "save",
        }
        row |= {"said": _said(act), "text": text, "failed": failed}
        rows.append(row)
        if not on_all(context, bool(row["said"])):
            break
        row["again"] = _said(saver.wait)
        if not on_all(context, not row["again"]):
            break
    _said(saver.wait)
    started.settle()
    return rows


def keep_some(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """More saves than are kept: the steps that have a manifest afterwards."""
    found = []
    for keep in KEPT:
        disk = SimDisk()
        saver, started = unit.AsyncSaver(context.comm, disk, keep), Started()
        for step in SAVED:
            saver.save(step, tensors_of(context.rank, step, seed), {})
            started.settle()
        saver.wait()
        started.settle()
        found.append(given.manifest_steps(disk.names()))
    return found
