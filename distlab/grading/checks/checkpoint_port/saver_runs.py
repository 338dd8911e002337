"""What the ranks do in task 4.17, and what a single process makes of it.

In one run the ranks change from n to n - 1 and back to n, each time in processes that
seem new. In the other one, n ranks
train while a save waits for its disk; later the disk of the last rank is full, twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.kit.again import played_once
from distlab.grading.kit.shard_training import (
    BaselineMomentum,
    Momentum,
    batch_of,
    full_weights,
    local,
    make_model,
    one_step,
)
from distlab.grading.kit.torch_group import join
from distlab.runner import RankContext

if TYPE_CHECKING:
    from distlab.grading.checks.checkpoint_port.storage import Storage

WORLDS = (3,)
FIRST, SECOND = 9, 10  # steps with a checkpoint: as text "9" comes after "10"
FAILING, NEXT, LATER, FAILING_TOO = 11, 12, 13, 14
OTHER_LR = 0.02  # of an optimizer that has loaded nothing
SETTINGS = {"lr": 0.1, "momentum": 0.7}  # of the one that is saved first
PATIENCE_S = 3.0  # how long a complete checkpoint may take
BLOCKED_S = 1.0  # how long a call that doesn't wait finds the save unwritten


def sizes_of(n: int) -> tuple[int, ...]:
    """The numbers of ranks, one life after the other."""
    return n, n - 1, n


def own_of(life: int, rank: int) -> Tensor:
    """What a rank has before it loads; it adds 50 before it saves.

    Its elements do not lie side by side.
    """
    own = torch.tensor([[100 * (life % 2) + rank, 7], [life, 7]], dtype=torch.uint8)
    return own[:, 0]


def own_loaded(n: int, life: int, rank: int) -> Tensor:
    """What a rank has once it has loaded."""
    if life == 0 or rank >= sizes_of(n)[life - 1]:
        return own_of(life, rank)
    return own_loaded(n, life - 1, rank) + 50


def new_folder() -> str:
    """The name of a folder for all ranks, that is not there yet."""
    name = [f"checkpoints {time.monotonic_ns()}"]
    dist.broadcast_object_list(name, 0)
    return str(Path.cwd().parent / name[0])


def whole(seed: int) -> nn.Sequential:
    """The model, not sharded: one parameter is frozen, a buffer counts the steps."""
    model = make_model(seed)
    model[-1].bias.requires_grad_(False)
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    return model


def fresh(seed: int) -> tuple[nn.Sequential, Momentum]:
    """A sharded model and its optimizer."""
    from torch.distributed.fsdp import fully_shard  # a second, which judges don't need

    model = whole(seed)
    fully_shard(model)  # one group: each has collectives of its own in every step
    return model, Momentum(model, lr=OTHER_LR)


def _storage(unit: ModuleType) -> Storage:
    from distlab.grading.checks.checkpoint_port.storage import Storage

    return Storage(unit)


def most_of(model: nn.Module) -> int:
    """The elements of this rank's largest shard."""
    return max(local(parameter).numel() for parameter in model.parameters())


def train(
    model: nn.Module, optimizer: Momentum, seed: int, steps: range, rank: int
) -> None:
    """So many steps."""
    for step in steps:
        one_step(model, optimizer, batch_of(seed, step, rank))
        model.get_buffer("steps").add_(1)


# ── n ranks, n - 1 ranks, n ranks ───────────────────────────────────────────────────


def three_lives(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any] | None]:
    """For each life: what was loaded, and the weights a step later."""
    join(context)
    store: Any = c10d._get_default_store()
    folder = new_folder()
    leave_default_group()
    lives: list[dict[str, Any] | None] = []
    for life, size in enumerate(sizes_of(context.world_size)):
        if context.rank >= size:
            lives.append(None)
            continue
        os.environ["WORLD_SIZE"] = str(size)
        dist.init_process_group(
            "gloo",
            store=c10d.PrefixStore(f"life {life}", store),
            rank=context.rank,
            world_size=size,
        )
        with _storage(unit) as storage:
            lives.append(_live(unit, storage, folder, seed, life))
        leave_default_group()
    return lives


def _live(
    unit: ModuleType, storage: Storage, folder: str, seed: int, life: int
) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer = fresh(seed + life)
    own = own_of(life, rank)
    saver = unit.Saver(folder)
    if life == 0:
        optimizer.param_groups[0].update(SETTINGS)
    with process_id(os.getpid() + 1000 * life):
        step = unit.load(folder, model, optimizer, own)
    found = {"step": step, "own": own.clone()}
    found |= {"read": storage.read, "shard": most_of(model)}
    train(model, optimizer, seed, steps_of(life), rank)
    found |= {"weights": full_weights(model), "steps": int(model.get_buffer("steps"))}
    own += 50
    with process_id(os.getpid() + 1000 * life):
        saver.save((FIRST, SECOND, NEXT)[life], model, optimizer, own)
    saver.wait()
    storage.settle()
    dist.barrier()
    if life == 2:
        file = Path(f"{folder} file")
        file.touch()
        with contextlib.suppress(OSError):
            unit.load(str(file), model, optimizer, own)
            found["unlisted"] = True
        dist.barrier()
    return found


@contextlib.contextmanager
def process_id(number: int) -> Iterator[None]:
    """Give this process another id: a later life is that of another process."""
    known, os.getpid = os.getpid, lambda: number
    try:
        yield
    finally:
        os.getpid = known


def steps_of(life: int) -> range:
    """Two steps first: the momentum counts from the second one on; then one."""
    return range(2) if life == 0 else range(life + 1, life + 2)


# ── a save that waits for its disk ──────────────────────────────────────────────────


@played_once
def in_background(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Saves while training goes on; a full disk; what a new model loads."""
    join(context)
    with _storage(unit) as storage:
        storage.refuses = True
        try:
            return _saves(context, unit, storage, seed)
        finally:
            storage.settle()
            leave_default_group()


def _saves(
    context: RankContext, unit: ModuleType, storage: Storage, seed: int
) -> dict[str, Any]:
    rank, folder = context.rank, new_folder()
    model, optimizer = fresh(seed)
    saver, own = unit.Saver(folder), own_of(0, rank)
    found: dict[str, Any] = {}
    storage.gated = True
    train(model, optimizer, seed, range(1), rank)
    saver.save(FIRST, model, optimizer, own)
    train(model, optimizer, seed, range(1, 2), rank)
    storage.permit_once_waited(BLOCKED_S)
    found["early"] = raised(lambda: saver.save(SECOND, model, optimizer, own))
    found["saved"] = full_weights(model)
    train(model, optimizer, seed, range(2, 3), rank)
    own += 50
    found["later"] = full_weights(model)
    storage.permit_once_waited(BLOCKED_S / 2)
    found["early"] = raised(saver.wait) or found["early"]
    found["unwritten"] = storage.begun - storage.written
    found |= storage.notes() | {"shard": most_of(model)}
    if any(_on_all_ranks([found[key] for key in ("early", "shared", "unwritten")])):
        return found  # the rest would tell of the same mistake
    storage.gated = False
    found["loaded"] = load_fresh(unit, folder, seed, rank)
    storage.failing = rank == context.world_size - 1
    storage.begun = storage.written = 0
    found["failing"] = raised(lambda: saver.save(FAILING, model, optimizer, own))
    storage.settle()
    storage.failing = False
    found["next"] = raised(lambda: saver.save(NEXT, model, optimizer, own))
    storage.settle()
    dist.barrier()
    if _on_all_ranks([found["next"]])[0]:
        found["reloaded"] = load_fresh(unit, folder, seed, rank)
    if not _on_all_ranks([not found["next"]])[0]:
        found |= goes_on(unit, storage, (saver, model, optimizer, own), folder, seed)
    return found


def goes_on(
    unit: ModuleType,
    storage: Storage,
    saved: tuple[Any, nn.Module, Momentum, Tensor],
    folder: str,
    seed: int,
) -> dict[str, Any]:
    """After an error was raised: a save that succeeds, one that fails, a copy."""
    rank, n = dist.get_rank(), dist.get_world_size()
    saver, model, optimizer, own = saved
    before = complete_in(folder)
    dist.barrier()
    found: dict[str, Any] = {"later_weights": full_weights(model)}
    found["after"] = raised(lambda: saver.save(LATER, model, optimizer, own))
    storage.settle()
    end = time.monotonic() + PATIENCE_S
    while complete_in(folder) <= before and time.monotonic() < end:
        time.sleep(0.005)
    found["added"] = complete_in(folder) > before
    dist.barrier()
    if any(_on_all_ranks([found["after"], not found["added"]])):
        return found
    found["resumed"] = load_fresh(unit, folder, seed, rank)
    storage.failing = rank == n - 1
    found["early"] = raised(lambda: saver.save(FAILING_TOO, model, optimizer, own))
    found["waited"] = raised(saver.wait)
    storage.settle()
    storage.failing = False
    dist.barrier()
    found["again"] = raised(saver.wait)
    other = new_folder()
    if rank == 0:
        copy_the_wrong_way_round(folder, other)
    dist.barrier()
    found["copied"] = load_fresh(unit, other, seed, rank)
    return found


def complete_in(folder: str) -> int:
    """How many complete checkpoints there are."""
    return len(list(Path(folder).rglob(".metadata")))


def copy_the_wrong_way_round(folder: str, other: str) -> None:
    """Copy a folder: what was the newest there is the oldest here."""

    def time_of(path: Path) -> int:
        return path.stat().st_mtime_ns

    times = sorted(time_of(path) for path in Path(folder).rglob("*"))
    Path(other).mkdir()
    for top in sorted(Path(folder).iterdir(), key=time_of, reverse=True):
        if top.is_dir():
            shutil.copytree(top, Path(other) / top.name)
        else:
            shutil.copy2(top, other)
    places = sorted(Path(folder).rglob("*"), key=time_of, reverse=True)
    for place, past in zip(places, times, strict=True):
        os.utime(Path(other) / place.relative_to(folder), ns=(past, past))


def _on_all_ranks(noted: list[Any]) -> list[bool]:
    """For each note whether a rank has it, as all ranks see it."""
    flags = torch.tensor([bool(note) for note in noted], dtype=torch.int64)
    dist.all_reduce(flags)
    return [bool(flag) for flag in flags]


def load_fresh(unit: ModuleType, folder: str, seed: int, rank: int) -> dict[str, Any]:
    """What a new model finds in a folder."""
    model, optimizer = fresh(seed + 7)
    own = own_of(1, rank)
    found: dict[str, Any] = {"step": None, "raised": ""}

    def load() -> None:
        found["step"] = unit.load(folder, model, optimizer, own)

    found["raised"] = raised(load)
    return found | {"weights": full_weights(model), "own": own}


def raised(call: Any) -> str:
    """What it raises, in short; DCP's error is no Exception."""
    try:
        call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1].strip()}"[:90]
    return ""


# ── what is right ───────────────────────────────────────────────────────────────────


@lru_cache(maxsize=32)
def baseline(seed: int, n: int, life: int, lost: str = "") -> Tensor:
    """The weights at the end of a life; `lost` is what that one did not load."""
    model = whole(seed)
    optimizer = BaselineMomentum(model)
    optimizer.param_groups[0].update(SETTINGS)
    for past in range(life + 1):
        if past == life and lost == "all":
            model = whole(seed + life)
        if past == life and lost == "frozen":
            new = dict(whole(seed + life).named_parameters())
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    parameter.data.copy_(new[name])
        if past == life and lost in ("all", "optimizer"):
            optimizer = BaselineMomentum(model, lr=OTHER_LR)
        if past == life and lost in ("settings", "momentum"):
            optimizer.param_groups[0]["momentum"] = 0.9
        if past == life and lost == "settings":
            optimizer.param_groups[0]["lr"] = OTHER_LR
        for step in steps_of(past):
            batches = [batch_of(seed, step, rank) for rank in range(sizes_of(n)[past])]
            inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
            one_step(model, optimizer, (inputs, targets))
    return full_weights(model)
