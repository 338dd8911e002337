"""Send each member of a new group the parts of a state that it lacks."""

from __future__ import annotations

from distlab.checkpoints.training_state import State
from distlab.comm import Comm
from distlab.distributed.copies import (
    CopyPlan,
    Holdings,
    Slot,
    decode_own,
    decode_shared,
    encode_shared,
    shared_of,
)
from distlab.distributed.regrouping import recv_bytes, send_bytes


def gather_state(
    comm: Comm, holds: Holdings, plan: CopyPlan
) -> tuple[State, list[State]]:
    """Return the shared state and the own states as `restore` takes them; collective.

    If the group has a new size, every rank needs the own states of all ranks, otherwise
    only its own.
    """
    slot = holds.find(plan.label)
    shared = _shared_part(comm, slot, plan)
    needs_all = plan.size != comm.world_size or bool(plan.lost)
    owns: dict[int, State] = {}
    for old, holder in sorted(plan.owns.items()):
        takers = range(comm.world_size) if needs_all else [old]
        own = _own_part(comm, slot, old, holder, takers)
        if own is not None:
            owns[old] = decode_own(own)
    if needs_all:
        return shared, [owns[old] for old in sorted(owns)]
    return shared, [owns[comm.rank]] * comm.world_size


def _shared_part(comm: Comm, slot: Slot | None, plan: CopyPlan) -> State:
    """Return the shared state, which `plan.source` sends to the ranks that lack it."""
    if comm.rank == plan.source:
        assert slot is not None
        data = encode_shared(slot)
        for rank in range(comm.world_size):
            if rank not in plan.complete:
                send_bytes(comm, data, rank)
    if slot is not None:
        return shared_of(slot)
    return decode_shared(recv_bytes(comm, plan.source))


def _own_part(
    comm: Comm, slot: Slot | None, old: int, holder: int, takers: range | list[int]
) -> bytes | None:
    """Return the own part of a rank of the old group on `takers`, None on others."""
    if comm.rank != holder:
        return recv_bytes(comm, holder) if comm.rank in takers else None
    assert slot is not None
    own = slot.own if slot.rank == old else slot.theirs
    for taker in takers:
        if taker != holder:
            send_bytes(comm, own, taker)
    return own if holder in takers else None
