"""Checks of 4.13, `fault_tolerance.async_save`: real ranks, disks that can be held up.

Each rank has a disk of its own, whose operations in a thread wait while it is held up.
So what a save does before it returns, and what later, does not depend on time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import DiskError
from distlab.given import checkpoint as given
from distlab.grading.checks.fault_tolerance.disks import tensors_of
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.sim import SimDisk

TASK = "fault_tolerance.async_save"
WORLDS = (3, 2, 1)
_LIMIT_S = 5.0  # after that a disk is held up no more: somebody waits for it


class HeldDisk(SimDisk):
    """A disk whose operations in a thread wait while it is held up."""

    def __init__(self) -> None:
        super().__init__()
        self._is_free = threading.Event()
        self._is_free.set()
        self.full = ""
        self.steps: list[int] = []  # of each operation
        self.was_in_main = self.was_waited_for = False

    def hold(self) -> None:
        """From now on operations in a thread wait."""
        self._is_free.clear()

    def free(self) -> None:
        """They go on."""
        self._is_free.set()

    def write(self, path: str, data: bytes) -> None:
        """See `Disk.write`."""
        self._pass(path)
        if self.full and self.full in path:
            raise DiskError(f'the disk is full: no room for all of "{path}"')
        super().write(path, data)

    def sync(self, path: str) -> None:
        """See `Disk.sync`."""
        self._pass(path)
        super().sync(path)

    def _pass(self, path: str) -> None:
        self.steps.append(given.step_of(path) or -1)
        if threading.current_thread() is threading.main_thread():
            self.was_in_main = True
        elif not self._is_free.wait(_LIMIT_S):
            self.was_waited_for = True
            self._is_free.set()


class _Watched(torch.Tensor):
    """Notes if a thread that is not the main one reads it."""

    was_read_later = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()


class _WatchedDict(dict[str, Any]):
    """The same for the meta."""

    def items(self) -> Any:
        _note()
        return super().items()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: deepcopy(value) for name, value in self.items()}


class _WatchedList(list[Any]):
    """The same for what is in the meta."""

    def __iter__(self) -> Any:
        _note()
        return super().__iter__()

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(self)


def _note() -> None:
    if threading.current_thread() is not threading.main_thread():
        _Watched.was_read_later = True


def _watched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().as_subclass(_Watched) for name, t in tensors.items()}


def save_and_train(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A save while the disk is held up, and training goes on."""
    disk, rank = HeldDisk(), context.rank
    saver = unit.AsyncSaver(context.comm, disk)
    wanted = [tensors_of(rank, step, seed) for step in (1, 2)]
    tensors = _watched(wanted[0])
    meta = _WatchedDict(seen=_WatchedList([1, 2]))
    _Watched.was_read_later = False
    disk.hold()
    saver.save(1, tensors, meta)
    in_main = disk.was_in_main or disk.was_waited_for
    total = torch.ones(3)
    context.comm.all_reduce(total)  # training's messages travel meanwhile
    _change(tensors, meta)
    disk.free()
    saver.wait()
    read_later = _Watched.was_read_later
    first = _shard(disk, 1, rank)
    tensors = _watched(wanted[1])
    saver.save(2, tensors, {"seen": [3]})
    _change(tensors, {"seen": []})
    saver.wait()
    second = _shard(disk, 2, rank)
    return {
        "waits": in_main,
        "sum": float(total[0]),
        "read_later": read_later,
        "flaws": [
            _flaw(first, wanted[0], {"seen": [1, 2]}),
            _flaw(second, wanted[1], {"seen": [3]}),
        ],
        "manifests": [name for name in disk.names() if name.endswith(".json")],
    }


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
        return "there is no shard of this rank after wait()"
    if shard.tensors.keys() != tensors.keys():
        return "the shard has other tensors"
    for name, tensor in tensors.items():
        if not torch.equal(shard.tensors[name], tensor):
            later = not shard.tensors[name].any() and bool(tensor.any())
            return f'"{name}" has {"the values of later" if later else "other values"}'
    return "" if shard.meta == meta else f"the meta is {shard.meta}, expected {meta}"


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
    return {"two": False, "said": said, "has_4": 4 in disk.steps}


def _said(act: Callable[[], None]) -> str:
    try:
        act()
    except given.CheckpointError as error:
        return str(error)
    return ""


@clause(TASK, "C1", worlds=WORLDS, runs=[on_ranks(save_and_train)])
def the_values_of_the_call(runs: Runs) -> str | None:
    """V: the shards, although training changes tensors and meta at once."""
    run = runs.finished(save_and_train)
    for rank, value in enumerate(run.values):
        for step, flaw in enumerate(value["flaws"], 1):
            if not flaw:
                continue
            is_later = "values of later" in flaw or "99" in flaw
            raise NotYetError(
                f"tensors and meta are changed after save({step}) has returned; the "
                f"checkpoint of rank {rank}: {flaw}",
                slug="not-copied" if is_later else "",
                rule="copy the tensors and the meta before the thread starts"
                if is_later
                else "",
            )
        if value["read_later"]:
            raise NotYetError(
                f"rank {rank}: another thread reads the tensors or the meta that save "
                "was given, while training may change them",
                slug="not-copied",
                rule="copy the tensors and the meta before the thread starts",
            )
    return "tensors of six kinds, and the meta, changed while the disk is held up"


@clause(TASK, "C2", worlds=WORLDS, runs=[on_ranks(save_and_train)])
def returns_at_once(runs: Runs) -> str | None:
    """O: what the disk has been asked for when save returns."""
    run = runs.finished(save_and_train)
    for rank, value in enumerate(run.values):
        if value["waits"]:
            raise NotYetError(
                f"rank {rank}: save returned only when its files were written",
                slug="waits-for-the-disk",
                rule="start a thread that saves, and return",
            )
    with judged_after(the_values_of_the_call, runs, "C1"):
        _expect_manifests(run)
    return None


def _expect_manifests(run: Run) -> None:
    names = run.values[0]["manifests"]
    if names != ["step-1.json", "step-2.json"]:
        raise NotYetError(
            f"after wait() rank 0's disk has the manifests {names}, expected those of "
            "steps 1 and 2"
        )


@clause(TASK, "C3", worlds=WORLDS, runs=[on_ranks(save_in_turn)])
def one_at_a_time(runs: Runs) -> str | None:
    """O, V: operations of two saves; which call raises the error of a full disk."""
    run = runs.finished(save_in_turn)
    bad = f"rank {runs.world_size - 1}"
    for rank, value in enumerate(run.values):
        if value["two"]:
            raise NotYetError(
                f"rank {rank}: save(2) writes while save(1) is held up by the disk",
                slug="two-at-a-time",
                rule="call self.wait() first",
            )
        said, where = value["said"], f"the disk of {bad} was full in save(3): on rank"
        if bad not in said[1]:
            raise NotYetError(
                f"{where} {rank} the next call, save(4), "
                + (f'raises "{said[1]}"' if said[1] else "raises no error"),
                slug="" if said[1] else "error-lost",
                rule="" if said[1] else "keep the thread's error, and raise it in wait",
            )
        if value["has_4"]:
            raise NotYetError(
                f"{where} {rank} save(4) raises that error, and writes step 4 as well"
            )
        if said[2] or said[3]:
            raise NotYetError(
                f"{where} {rank} save(4) raises the error, and a later call does so "
                f'again: "{said[2] or said[3]}"',
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
        if bad not in said[5]:
            raise NotYetError(
                f"the disk of {bad} was full in save(6): on rank {rank} wait() "
                + (f'raises "{said[5]}"' if said[5] else "raises no error"),
                slug="" if said[5] else "error-lost",
            )
        if any(said[6:]):
            raise NotYetError(
                f"the disk of {bad} was full in save(6): on rank {rank} wait() raises "
                "the error, and a later call does so again",
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
    return "two saves in a row; a full disk on the last rank"
