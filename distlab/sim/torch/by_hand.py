"""Stores and process groups that a script makes itself, without init_process_group.

A store is found by its arguments: whoever names the same one shares it. A group such as
`ProcessGroupGloo(store, rank, size)` is made of whoever meets in its store: each rank
says there who it is, and the first one tells all of them who the members are.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from distlab.sim.torch.group import SimProcessGroup
from distlab.sim.torch.rank import here, subgroup
from distlab.sim.torch.replacing import Replaced, made_elsewhere
from distlab.sim.torch.store import SimStore

_MEMBERS = "distlab/members"


def replace_by_hand(replaced: Replaced) -> None:
    """Let a script make stores and groups; they are the simulation's."""
    for owner in (dist, distributed_c10d):
        for name in ("TCPStore", "FileStore"):
            replaced.for_ranks(owner, name, _store)
        for name, backend in (
            ("ProcessGroupGloo", "gloo"),
            ("ProcessGroupNCCL", "nccl"),
        ):
            original: Any = getattr(owner, name, _NotBuilt)
            replaced.put(owner, name, _class_like(original, backend))


def _store(*args: Any, **kwargs: Any) -> SimStore:
    """One rank's view of a store made by hand, which all see that name it alike."""
    rank = here()
    assert rank is not None
    named = [str(value) for value in (*args[:2], *kwargs.values())][:2]
    store = SimStore(rank, ":".join(named))
    rank.stores.append(store)
    return store


class _Options(SimpleNamespace):
    """The options of a group over NCCL, none of which matter here."""

    def __init__(self, **options: Any) -> None:
        super().__init__(config=SimpleNamespace(), **options)


class _NotBuilt:
    """Stands for a class that this build of torch doesn't have."""

    Options = _Options


def _class_like(original: type, backend: str) -> type:
    def make(*args: Any, **kwargs: Any) -> SimProcessGroup:
        return _group(backend, *args, **kwargs)

    return made_elsewhere(original, make)


def _group(
    backend: str, store: Any, rank: int, size: int, *options: Any, **more: Any
) -> SimProcessGroup:
    """Meet the other members in `store`; collective."""
    me = here()
    assert me is not None
    store.set(f"{_MEMBERS}/{rank}", str(me.number))
    if rank == 0:
        keys = [f"{_MEMBERS}/{member}" for member in range(size)]
        numbers = [int(store.get(key)) for key in keys]
        name = f"group {len(me.formed)} of rank {me.number}"
        store.set(_MEMBERS, json.dumps([name, numbers]))
    name, members = json.loads(store.get(_MEMBERS))
    me.formed.append((name, tuple(members)))
    group = SimProcessGroup(me, subgroup(me.comm, name, members), name)
    group.asked_for = backend
    return group
