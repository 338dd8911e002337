"""torch's process-wide records, kept per simulated rank while a run lasts.

torch keeps one set of groups per process. During a run each rank's thread finds its own
instead, and every name that was replaced has its old value back afterwards. Private
names of torch that this rests on, all checked against the tested versions:

    torch.distributed.distributed_c10d
        _world, _World               the record of groups; an object with our look-up
        _new_process_group_helper    whatever backend is asked for, ours is made
        rendezvous                   gives the run's own store, whatever the address
        _default_pg_init_method, _backend, GroupMember   what init_process_group writes
    torch._C._distributed_c10d._set_thread_isolation_mode   C++ group names per thread
    Backend._plugins, backend_list, backend_type_map, …     what register_backend writes
    torch._C._current_graph_task_id, _current_autograd_node                     work.py
    torch.autograd.Variable._execution_engine.queue_callback                    rank.py
    torch.utils._python_dispatch.TorchDispatchMode, flop_registry               flops.py
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d

from distlab.sim.torch import shortcuts
from distlab.sim.torch.group import SimProcessGroup
from distlab.sim.torch.rank import here, subgroup
from distlab.sim.torch.store import SimStore

BACKEND = "distlab_sim"
c10d: Any = distributed_c10d
_bindings: Any = torch._C._distributed_c10d
_environ: Any = os.environ
_MISSING = object()


@contextmanager
def installed() -> Iterator[None]:
    """Within the block, the threads of simulated ranks find their own world."""
    with ExitStack() as stack:
        for owner, name in _WRITTEN:
            stack.callback(_put_back, owner, name, _saved(owner, name))
        stack.callback(_bindings._set_thread_isolation_mode, False)
        _bindings._set_thread_isolation_mode(True)
        dist.Backend.register_backend(
            BACKEND, _make_group, extended_api=True, devices=["cpu"]
        )
        stack.enter_context(shortcuts.taken())
        with FakeTensorMode():
            pass  # torch 2.11 built for CUDA crashes if its first one is in a thread
        c10d._world = _Worlds(c10d._world)
        c10d._new_process_group_helper = _in_our_backend(c10d._new_process_group_helper)
        c10d.rendezvous = _meeting(c10d.rendezvous)
        environment = _Environment(_environ._data)
        stack.callback(environment.undo)
        _environ._data = environment
        yield


_WRITTEN: list[tuple[Any, str]] = [
    *((c10d, name) for name in ("_world", "_new_process_group_helper", "rendezvous")),
    *((c10d, name) for name in ("_backend", "_default_pg_init_method")),
    *((dist.Backend, name) for name in ("_plugins", "backend_list")),
    *((dist.Backend, name) for name in ("backend_type_map", "backend_capability")),
    *((dist.Backend, name) for name in ("default_device_backend_map", BACKEND.upper())),
    (os.environ, "_data"),
    (sys, "excepthook"),
]


def _saved(owner: Any, name: str) -> Any:
    value = getattr(owner, name, _MISSING)
    if owner is dist.Backend and isinstance(value, (dict, list)):
        # These are written into; what was imported elsewhere must stay the same object.
        return value, value.copy()
    return value


def _put_back(owner: Any, name: str, saved: Any) -> None:
    if isinstance(saved, tuple):
        value, before = saved
        value.clear()
        (value.update if isinstance(value, dict) else value.extend)(before)
    elif saved is not _MISSING:
        setattr(owner, name, saved)
    elif hasattr(owner, name):
        delattr(owner, name)


# ── the record of groups ────────────────────────────────────────────────────────────


class RankWorld(c10d._World):  # type: ignore[misc]
    """One rank's groups.

    The default group is there from the start. Only init_process_group does not see that
    one, so that code which calls it works as well, and makes its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_ours = False  # the default group; not of the code that runs
        self._records: dict[str, dict[Any, Any]] = {name: {} for name in _RECORDS}
        self._group_count = 0

    @property
    def default_pg(self) -> Any:
        """The group of all ranks."""
        if self.is_ours and _asked_by_init():
            self._default_pg, self.is_ours = None, False
        return self._default_pg

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg, self.is_ours = group, False

    @property
    def group_count(self) -> int:
        """How many groups there have been; their names are made of it."""
        return self._group_count

    @group_count.setter
    def group_count(self, count: int) -> None:
        self._group_count = count


_RECORDS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("tags_to_pg", "pg_to_tag"),
)


def _record(name: str) -> property:
    return property(lambda self: self._records[name])


for _name in _RECORDS:
    setattr(RankWorld, _name, _record(_name))

_INIT_CODE = inspect.unwrap(dist.init_process_group).__code__


def _asked_by_init() -> bool:
    """Whether init_process_group looks if there is a group already."""
    # By way of GroupMember.WORLD, _Worlds and default_pg.
    return sys._getframe(4).f_code is _INIT_CODE


class _Worlds:
    """In the place of torch's record: the one of the rank whose thread asks."""

    def __init__(self, outer: Any) -> None:
        object.__setattr__(self, "_outer", outer)

    def __getattr__(self, name: str) -> Any:
        rank = here()
        return getattr(rank.world if rank else self._outer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        rank = here()
        setattr(rank.world if rank else self._outer, name, value)


# ── how a group comes about ─────────────────────────────────────────────────────────


def _make_group(options: Any, backend_options: Any) -> SimProcessGroup:
    rank = here()
    assert rank is not None
    members = list(options.global_ranks_in_group)
    name = str(options.group_id)
    if not members and rank.num_active < rank.world_size:
        members, name = list(range(rank.num_active)), f"first {rank.num_active}"
        rank.formed.append((name, tuple(members)))
    comm = subgroup(rank.comm, name, members) if members else rank.comm
    return SimProcessGroup(rank, comm, name)


def _in_our_backend(original: Any) -> Any:
    def helper(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        me = here()
        if me is None:
            return original(size, rank, ranks, backend, *args, **kwargs)
        if ranks:
            me.formed.append((str(args[1]), tuple(ranks)))
        ours = dist.Backend(BACKEND)
        group, store = original(size, rank, ranks, ours, *args, **kwargs)
        if isinstance(group, SimProcessGroup):  # get_backend() says what was asked for
            c10d._world.pg_map[group] = (backend, store)
            group.asked_for = str(backend).lower()
        return group, store

    return helper


def _meeting(original: Any) -> Any:
    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[tuple[Any, int, int]]:
        me = here()
        if me is None:
            yield from original(url, rank, world_size, **kwargs)
            return
        size = world_size
        if size == -1:
            size = int(os.environ.get("WORLD_SIZE", me.world_size))
        if rank not in (-1, me.number) or not me.number < size <= me.world_size:
            raise ValueError(
                f"init_process_group(rank={rank}, world_size={world_size}), but this "
                f"is simulated rank {me.number} of {me.world_size}"
            )
        # A default group of the first few ranks only, such as those of mp.spawn.
        me.num_active = size
        me.num_inits[size] += 1
        me.stores.append(SimStore(me, f"default group {me.num_inits[size]} of {size}"))
        yield me.stores[-1], me.number, size

    return rendezvous


# ── the environment ─────────────────────────────────────────────────────────────────


class _Environment(MutableMapping[bytes, bytes]):
    """`os.environ` by rank: what a rank sets, or a launcher would have set for it."""

    def __init__(self, outer: Any) -> None:
        self._outer = outer
        self._touched: set[bytes] = set()  # Python also tells the process of changes

    def _mine(self) -> Any:
        rank = here()
        return self._outer if rank is None else rank.environment

    def undo(self) -> None:
        """Take back what the process was told."""
        for key in self._touched:
            if key in self._outer:
                os.putenv(key, self._outer[key])
            else:
                os.unsetenv(key)

    def __getitem__(self, key: bytes) -> bytes:
        return self._mine()[key]  # type: ignore[no-any-return]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._touched.add(key)
        self._mine()[key] = value

    def __delitem__(self, key: bytes) -> None:
        self._touched.add(key)
        del self._mine()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


def environment_of(
    rank: int, world_size: int, per_node: int, outer: dict[bytes, bytes]
) -> dict[bytes, bytes]:
    """What torchrun would put into the environment of that rank."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": world_size // per_node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "sim",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {**outer, **{k.encode(): str(v).encode() for k, v in own.items()}}
