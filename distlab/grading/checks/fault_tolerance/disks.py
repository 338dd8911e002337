"""Ranks that share one simulated disk, and what a checkpoint on it is worth.

What is complete is worked out here, from the files alone: what the unit's own `load`
says does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from distlab.checkpoints import files as given
from distlab.comm import Call, Comm, Disk, DiskError, Wrapper
from distlab.digests import digest
from distlab.grading.kit.nodes import local_rank
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, CrashPoint, run
from distlab.sim.observed_disk import ObservedDisk, Put

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
_WALL_LIMIT_S = 5.0
Files = Mapping[str, bytes]
T = TypeVar("T")
Row = list[Any]
"""An operation: its rank, its name, its paths."""


def row_of(rank: int, name: str, arguments: Sequence[str | bytes]) -> Row:
    """An operation without its data."""
    return [rank, name, *(path for path in arguments if isinstance(path, str))]


class RankDisk(ObservedDisk):
    """One rank's view of the disk: each operation takes time, more of it on late ranks.

    `rows` notes the operations of all ranks. A write to a file with `full` in its name
    fails in the middle: no room.
    """

    def __init__(
        self, disk: Disk, context: RankContext, rows: list[Row], full: str = ""
    ) -> None:
        super().__init__(disk)
        self._context, self._rows, self._full = context, rows, full

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        self._context.clock.sleep(0.1 * (self._context.rank + 1))
        self._rows.append(row_of(self._context.rank, name, arguments))

    def _put(self, put: Put, path: str, data: bytes) -> None:
        if self._full and self._full in path:
            put(path, data[: len(data) // 2])
            raise DiskError(f'the disk is full: no room for all of "{path}"')
        put(path, data)


class OnNode(Wrapper):
    """A rank's communicator on a node where it has this place."""

    def __init__(self, inner: Comm, place: int) -> None:
        super().__init__(inner)
        self._place = place

    @property
    def local_rank(self) -> int:
        """See `Comm.local_rank`."""
        return self._place

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        return proceed()

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return OnNode(group, self._place)


def play_on_disk(
    program: Callable[[RankContext], Any], num_ranks: int, disk: Any = None
) -> tuple[list[Any], str]:
    """What the ranks return, and how the run ended: "" if all of them came to the end.

    A crash of the disk ends it like a return. The ranks are on nodes of two.

    Raises:
        Exception: the first that a rank raised.
    """
    errors: list[Exception] = []

    def rank(context: RankContext) -> Any:
        place = local_rank(context.rank, num_ranks)
        try:
            return program(replace(context, comm=OnNode(context.comm, place)))
        except Exception as error:
            errors.append(error)
            raise

    done = run(rank, num_ranks, net=NET, trace=False, wall_limit_s=_WALL_LIMIT_S)
    if getattr(disk, "is_down", False):
        return [], ""
    if errors:
        raise errors[0]
    return done.values, "" if done.outcome == "finished" else done.explanation


# ── what is saved ───────────────────────────────────────────────────────────────────


def tensors_of(rank: int, step: int, seed: int) -> dict[str, Tensor]:
    """Unlike in number and kind from rank to rank; rank 1 has none, rank 2 a nan."""
    if rank == 1:
        return {}
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    weight = torch.randn(2 + rank, 3, generator=generator)
    return {
        "weight": weight.t(),  # not contiguous
        "tied": weight,
        "half": weight[0].to(torch.bfloat16),
        "count": torch.tensor(step),
        "none": torch.empty(0, 3, dtype=torch.float64),
        "mask": weight.view(-1)[:3] > 0,
        **({"loss": torch.tensor([1.0, math.nan])} if rank == 2 else {}),
    }


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and each bit are the same."""
    is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and digest(one) == digest(other)


def meta_of(rank: int, step: int) -> dict[str, Any]:
    """Plain data; that of rank 2 is empty."""
    return {} if rank == 2 else {"rank": rank, "step": step, "name": "ü"}


def files_of_step(step: int, num_ranks: int, seed: int) -> dict[str, bytes]:
    """The files of a checkpoint as the ranks should write it."""
    files, records = {}, []
    for rank in range(num_ranks):
        data = given.encode_shard(tensors_of(rank, step, seed), meta_of(rank, step))
        records.append(given.record_of(data, step, rank))
        files[records[-1].name] = data
    manifest = given.Manifest(step=step, files=tuple(records))
    return files | {given.manifest_name(step): given.encode_manifest(manifest)}


# ── what is there ───────────────────────────────────────────────────────────────────


def flaw_of(files: Files, step: int) -> str:
    """Why the checkpoint of a step is not complete; "" if it is."""
    name = given.manifest_name(step)
    if name not in files:
        return f'there is no manifest "{name}"'
    try:
        manifest = given.decode_manifest(files[name])
    except ValueError as error:
        return f'"{name}": {error}'
    for record in manifest.files:
        if record.name not in files:
            return f'the manifest names "{record.name}", which is not there'
        data = files[record.name]
        if (len(data), given.sha256_of(data)) != record.content:
            return f'"{record.name}" has other bytes than the manifest says'
    return ""


def complete_steps(files: Files) -> list[int]:
    """The steps that could be loaded, the newest first."""
    steps = given.manifest_steps(list(files))
    return [step for step in reversed(steps) if not flaw_of(files, step)]


def when(point: CrashPoint) -> str:
    """`after sync("a")`, or at the start."""
    if not point.last:
        return "at the start"
    return f"after {point.last.partition(', b')[0].rstrip(')')})".replace("'", '"')


def file_in_words(name: str) -> str:
    """A file in a sentence, such as "rank 0's shard of step 10"."""
    step = given.step_of(name)
    if step is None:
        return f'"{name}"'
    _, is_shard, rest = name.partition(".rank-")
    what = f"rank {rest.partition('.')[0]}'s shard" if is_shard else "the manifest"
    temporary = "the temporary file of " * name.endswith(given.TEMPORARY)
    return f"{temporary}{what} of step {step}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return ", ".join(f'"{name}"' for name in names) or "nothing"


def expect_end(explanation: str, setting: str) -> None:
    """All ranks came to the end of the run.

    Raises:
        NotYetError: they did not; it says how the run ended.
    """
    if explanation:
        raise NotYetError(f"{setting}, {explanation}", kind="DEADLOCK")
