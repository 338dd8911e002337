"""Keep copies of a run's state in memory: a rank's own, and a part of another one's.

After each step, every rank copies its state and sends the part that only it has to the
next rank. So when a rank dies, each part of the newest step is still in some memory.

    rank 0   own ── 0 ──▶ rank 1   own ── 1 ──▶ rank 2   own ── 2 ──▶ rank 0

On several nodes, a rank sends it `shift` ranks further, to a rank on another node. Then
the same holds when a whole node dies.

We keep two steps, because one rank may have copied a step that another one hasn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from distlab.checkpoints.files import (
    JSON,
    Checkpoint,
    Copies,
    Shard,
    decode_shard,
    encode_shard,
    require_fit,
)
from distlab.checkpoints.training_state import State, pack, unpack

NUM_KEPT = 2


class Label(NamedTuple):
    """Identifies a state by its step and generation; a newer one compares as larger."""

    step: int
    generation: int


NONE = Label(-1, -1)


@dataclass
class Slot:
    """Holds the state of one step, and the own part of a rank before this one."""

    memory: Copies = field(default_factory=Copies)
    label: Label = NONE
    rank: int = 0
    size: int = 0
    shared: dict[str, Tensor] = field(default_factory=dict)
    shared_meta: dict[str, JSON] = field(default_factory=dict)
    own: bytes = b""
    theirs: bytes = b""  # of the rank `shift` before this one; empty: not received yet
    shift: int = 1


class Holdings:
    """Holds the newest steps in a process's memory."""

    def __init__(self) -> None:
        self._slots = [Slot() for _ in range(NUM_KEPT)]

    def copy(
        self, label: Label, rank: int, size: int, shared: State, own: State
    ) -> Slot:
        """Copy the state of a step into the slot that holds the oldest one.

        Raises:
            TypeError: a value in the state is neither a tensor nor plain data.
        """
        slot = min(self._slots, key=lambda slot: slot.label)
        slot.label = NONE  # if an error comes between, it is not held
        tensors, meta = pack(shared, {}, 0, 1)
        require_fit(meta)
        slot.shared, slot.shared_meta = slot.memory.of(tensors), meta
        slot.own, slot.theirs = encode_own(own), b""
        slot.rank, slot.size, slot.label = rank, size, label
        return slot

    def forget_after(self, step: int) -> None:
        """Forget newer steps, because the group continues from this one."""
        for slot in self._slots:
            if slot.label.step > step:
                slot.label = NONE

    def find(self, label: Label) -> Slot | None:
        """Return the slot with this label."""
        return next((slot for slot in self._slots if slot.label == label), None)

    def report(self) -> list[list[int]]:
        """List [step, generation, rank, size, shift] of each slot for peers.

        The shift is 0 if the slot lacks the other rank's part.
        """
        return [
            [*slot.label, slot.rank, slot.size, slot.shift if slot.theirs else 0]
            for slot in self._slots
            if slot.label.step >= 0
        ]


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """The state that all members take, and the ranks of the new group that have it."""

    label: Label
    size: int  # of the group that had the state
    source: int  # has the shared part
    owns: Mapping[int, int]  # rank in the old group → a rank that has its own part
    complete: tuple[int, ...]  # the ranks that have the shared part

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the ranks of the old group whose own part is in nobody's memory."""
        return tuple(rank for rank in range(self.size) if rank not in self.owns)


def plan_of(
    reports: Sequence[Sequence[Sequence[int]]], source: int | None = None
) -> CopyPlan | None:
    """Choose the newest state of which every part is held; reports are in rank order.

    With `source`, that rank must hold it. If no state is complete, choose the newest of
    which any process has the shared part. Return None if nobody holds a state yet.
    """
    plans: dict[Label, CopyPlan] = {}
    for rank, report in enumerate(reports):
        for step, generation, old_rank, size, shift in report:
            label = Label(step, generation)
            plan = plans.get(label) or CopyPlan(
                label=label, size=size, source=rank, owns={}, complete=()
            )
            owns = {**plan.owns, old_rank: rank}  # its own goes before a copy
            if shift:
                owns.setdefault((old_rank - shift) % size, rank)
            plans[label] = CopyPlan(
                label=label,
                size=size,
                source=plan.source,
                owns=owns,
                complete=(*plan.complete, rank),
            )
    if source is not None:
        own = {Label(*row[:2]) for row in reports[source]}
        plans = {label: plan for label, plan in plans.items() if label in own}
    full = [plan for plan in plans.values() if not plan.lost]
    return max(full or plans.values(), key=lambda plan: plan.label, default=None)


# ── the parts as bytes ──────────────────────────────────────────────────────────────


def encode_own(own: State) -> bytes:
    """Encode a rank's own part."""
    tensors, meta = pack({}, own, 0, 1)
    return encode_shard(tensors, meta)


def decode_own(data: bytes) -> State:
    """Decode what `encode_own` encoded."""
    return _unpack(decode_shard(data))[1]


def encode_shared(slot: Slot) -> bytes:
    """Encode the shared part of a slot."""
    return encode_shard(slot.shared, slot.shared_meta)


def decode_shared(data: bytes) -> State:
    """Decode what `encode_shared` encoded."""
    return _unpack(decode_shard(data))[0]


def shared_of(slot: Slot) -> State:
    """Return a slot's shared part as full_state returned it, with copied tensors."""
    # An optimizer may keep the tensors that it loads, and the slot's are used again.
    tensors = {name: tensor.clone() for name, tensor in slot.shared.items()}
    return _unpack(Shard(tensors, slot.shared_meta))[0]


def _unpack(shard: Shard) -> tuple[State, State]:
    shared, (own,) = unpack(Checkpoint(step=0, shards=(shard,)))
    return shared, own
