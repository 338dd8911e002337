"""Damage to checkpoints on a real disk: torn and flipped files, and killed ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import _ckpt_ranks as ranks
from distlab.checkpoints.files import Checkpoint, CheckpointError
from distlab.comm import RealDisk
from distlab.runner import Cluster, Limits

Load = Callable[[Any], Checkpoint | None]
LIMITS = Limits(seconds=120.0, memory_bytes=8 << 30)
RANKS = 3  # that save what is then damaged
SAVED_BYTES = 48 << 10
SHOWN = 5  # of what is wrong


@dataclass
class Damage:
    """What was done to files, and what nobody noticed."""

    done: int = 0
    missed: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)


def two_checkpoints(
    context: Any, parts: dict[str, Any], folder: str, num_bytes: int
) -> None:
    """Steps 1 and 2, by all ranks; both stay."""
    unit, disk = ranks.unit_of(parts), RealDisk(folder)
    for step in (1, 2):
        state = ranks.state_of(context.rank, num_bytes // context.world_size, step)
        unit.save(context.comm, disk, step, state, {"step": step})


def damaged(load: Load, folder: Path, count: int, seed: int = 0) -> Damage:
    """Truncate files and flip bits, one place at a time; every file in its turn.

    Of the two checkpoints in the folder the newer one is damaged: then the older one
    must be loaded. Or the newer one is taken away and the older one damaged: then
    nothing may be loaded. Whatever is loaded must have the values that were saved.
    """
    draw, disk, tally = random.Random(seed), RealDisk(folder), Damage()
    whole = {name: disk.read(name) for name in disk.names()}
    newer = [name for name in whole if name.startswith("step-2")]
    for number in range(count):
        if number == count // 2:
            for name in newer:
                (folder / name).unlink()
        older = number >= count // 2
        names = [name for name in whole if (name in newer) != older]
        name = names[number % len(names)]
        data, what = _changed(whole[name], draw, number // len(names))
        (folder / name).write_bytes(data)
        wrong = _unnoticed(load, disk, step=None if older else 1)
        if wrong:
            tally.missed.append(f"{name}, {what}: {wrong}")
        (folder / name).write_bytes(whole[name])
        tally.done += 1
        tally.files.add(name)
    for name in newer:
        (folder / name).write_bytes(whole[name])
    return tally


def _changed(data: bytes, draw: random.Random, number: int) -> tuple[bytes, str]:
    if number % 2:
        end = draw.randrange(len(data))
        return data[:end], f"the first {end} of {len(data)} bytes"
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    flipped = bytearray(data)
    flipped[place] ^= 1 << bit
    return bytes(flipped), f"bit {bit} of byte {place} flipped"


def _unnoticed(load: Load, disk: Any, step: int | None) -> str:
    """What was loaded that should not have been, or was not loaded; or nothing."""
    try:
        found = load(disk)
    except CheckpointError as error:
        return "" if step is None else f"nothing was loaded: {error}"
    if found is None:
        return "load() says that there is no checkpoint"
    if found.step != step:
        return f"step {found.step} was loaded"
    return _other_values(found)


def _other_values(found: Checkpoint) -> str:
    for rank, shard in enumerate(found.shards):
        right = ranks.state_of(rank, SAVED_BYTES // RANKS, found.step)
        for name, tensor in right.items():
            if not tensor.equal(shard.tensors[name]):
                return f"step {found.step} has other values in rank {rank}'s {name}"
    return ""


def without_checksums(unit: ModuleType) -> Load:
    """A planted mistake: the newest manifest is believed, whatever the shards have."""
    given = unit.given

    def load(disk: Any) -> Checkpoint | None:
        for step in reversed(given.manifest_steps(disk.names())):
            try:
                manifest = given.decode_manifest(disk.read(given.manifest_name(step)))
                shards = [
                    given.decode_shard(disk.read(one.name)) for one in manifest.files
                ]
            except (OSError, ValueError):
                continue
            return Checkpoint(step=step, shards=tuple(shards))
        raise CheckpointError("nothing is complete")

    return load


@dataclass
class Kills:
    """Ranks that were killed while they saved, and what was there after that."""

    done: int = 0
    saving: int = 0  # a file with a temporary name or without a manifest was there
    unloadable: list[str] = field(default_factory=list)


@dataclass
class _Killer:
    """Lets two saves come to their end, and kills in the third one."""

    cluster: Cluster
    dies: list[int]
    after_s: float
    acked: list[tuple[float, int]] = field(default_factory=list)

    def hear(self, rank: int, step: int) -> None:
        """A rank reports that a step was saved."""
        if rank:
            return
        self.acked.append((time.monotonic(), step))
        if len(self.acked) == 2:
            time.sleep(self.after_s)
            for who in self.dies:
                self.cluster.kill(who)


def killed(
    cluster: Cluster,
    load: Load,
    parts: dict[str, Any],
    folder: Path,
    count: int,
    num_bytes: int,
    seed: int = 0,
) -> Kills:
    """Kill ranks at random moments, and start again from what is there.

    It goes on until `count` of the kills have left the files of an unfinished save.
    """
    draw, tally, disk = random.Random(seed), Kills(), RealDisk(folder)
    reached, save_s = 0, 0.05
    while tally.saving < count:
        if tally.done == 8 * count:
            raise RuntimeError(f"{tally.done} kills, {tally.saving} within a save")
        n = draw.choice((1, 2))
        dies = draw.choice([[0], [*range(n)], [n - 1]])
        killer = _Killer(cluster, dies, draw.uniform(0.0, 1.2) * save_s)
        how = parts, str(folder), num_bytes, reached
        cluster.run(
            ranks.saves_forever,
            n,
            *how,
            on_report=killer.hear,
            limits=LIMITS,
            may_die=range(n),
            journal=False,
        )
        acked = killer.acked
        if len(acked) < 2:
            raise RuntimeError("the ranks ended before they were killed")
        save_s = 0.8 * save_s + 0.2 * (acked[1][0] - acked[0][0])
        tally.done += 1
        names = disk.names()
        found, wrong = _found_after_kill(load, disk, acked[-1][1], num_bytes)
        tally.saving += any(name.endswith(".tmp") for name in names) or any(
            name.startswith(f"step-{found + 1}.") for name in names
        )
        if wrong:
            tally.unloadable.append(f"kill {tally.done}: {wrong}")
        reached = max(found, reached)
    return tally


def _found_after_kill(
    load: Load, disk: Any, acked: int, num_bytes: int
) -> tuple[int, str]:
    try:
        found = load(disk)
    except CheckpointError as error:
        return 0, str(error)
    if found is None:
        return 0, f"there is no checkpoint, and step {acked} was saved"
    if found.step < acked:
        return found.step, f"step {found.step} is the newest, and {acked} was saved"
    for shard in found.shards:
        values = ranks.filled(found.step, num_bytes // found.world_size)
        if not values.equal(shard.tensors["step"]):
            return found.step, f"step {found.step} has other values"
    return found.step, ""
