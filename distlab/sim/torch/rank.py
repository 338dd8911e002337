"""One simulated rank as torch.distributed sees it: its clock, and what it waits for.

torch asks for "this process's" rank, groups and environment. Here a rank is a thread,
so all of that is looked up by thread: `here()` is the rank whose thread asks.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from distlab.comm import Journal
from distlab.comm._call import Call, Wrapper
from distlab.runner import RankContext
from distlab.sim.channels import Group
from distlab.sim.comm import SimComm, SimWork
from distlab.sim.kernel import Flight, Kernel
from distlab.sim.torch.played import Cast, Formed
from distlab.sim.torch.shared_store import SharedStore
from distlab.sim.torch.storages import Memory
from distlab.sim.torch.tally import Tally

_HERE = threading.local()


def here() -> Rank | None:
    """The simulated rank whose thread calls; None outside of simulated ranks."""
    return getattr(_HERE, "rank", None)


def settle_in(rank: Rank | None) -> None:
    """From now on the calling thread is that rank; None: it is none any more."""
    _HERE.rank = rank


class Rank:
    """A rank's communicator, its clock and its unfinished work.

    Compute is charged (`charge`), not measured. It is owed until the rank does
    something others can notice: only then the clock has to show it.
    """

    def __init__(
        self, context: RankContext, shared: SharedStore, seconds_per_flop: float
    ) -> None:
        self.comm, self.clock = context.comm, context.clock
        self.shared = shared
        self.world: Any = None  # torch's own record of this process's groups
        self.environment: dict[bytes, bytes] = {}
        self.fake: Any = None  # its fake tensors, in a run that has those
        self.cast: Cast | None = None  # who follows it, in a run where ranks do
        self.formed: list[Formed] = []  # all groups that it knows of
        self.num_joined: Counter[object] = Counter()  # collectives with data, by group
        self.stores: list[Any] = []  # that it made; torch holds half of each
        self.num_inits: Counter[int] = Counter()  # of default groups, by their size
        self.num_active = context.world_size  # ranks of the present default group
        self.per_node, self.device_index = context.world_size, 0
        self.memory = Memory(self.kernel)
        self.pretends = False  # to have a GPU
        self.users: Collection[str] = ()  # names of the modules that are the user's
        self.at_exit: list[Callable[[], object]] = []
        self.notes: set[str] = set()  # how the run differs from one on real ranks
        self._pid = os.getpid()
        self._seconds_per_flop = seconds_per_flop
        self._owed_s = 0.0
        self._num_messages = 0
        self._to_drain: list[Callable[[], object]] = []
        self._draining_for = -1

    @property
    def number(self) -> int:
        """Its rank in the world."""
        return self.comm.rank

    @property
    def tally(self) -> Tally:
        """The bytes of its tensors, fake or real."""
        found: Tally = self.fake.account if self.fake else self.memory
        return found

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.comm.world_size

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the rank has started, such as a worker."""
        return os.getpid() != self._pid

    def is_users(self, frame: FrameType) -> bool:
        """Whether a frame is in a module of the user."""
        return frame.f_globals.get("__name__") in self.users

    def next_step(self) -> int:
        """The number of its next message."""
        self._num_messages += 1
        return self._num_messages

    # ── time ────────────────────────────────────────────────────────────────────────

    @property
    def kernel(self) -> Kernel:
        """The kernel that moves the clock."""
        return innermost(self.comm).group.kernel

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        self.settle()
        return self.clock.now_s()

    def charge(self, flops: float) -> None:
        """Compute takes time: that of so many floating-point operations."""
        self._owed_s += flops * self._seconds_per_flop

    def settle(self) -> None:
        """Let the clock catch up with what this rank has computed."""
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s:
            self.clock.sleep(owed_s)

    # ── work that ends inside backward() ────────────────────────────────────────────

    def drain_after_backward(self, wait: Callable[[], object]) -> None:
        """Have work waited for before anyone waits for its future inside torch.

        DDP waits for its buckets in C++, where the kernel cannot see that the rank
        waits. It does so in a callback at the end of backward(); ours is asked for
        before it, at the first bucket, so it runs before it.
        """
        self._to_drain.append(wait)
        task = torch._C._current_graph_task_id()
        if task != self._draining_for:
            self._draining_for = task
            torch.autograd.Variable._execution_engine.queue_callback(self._drain)

    def _drain(self) -> None:
        self._draining_for = -1
        while self._to_drain:  # what follows on a future may start more
            self._to_drain.pop(0)()


def innermost(comm: Any) -> SimComm:
    """The simulated communicator inside of its wrappers."""
    while isinstance(comm, Wrapper):
        comm = comm._inner
    if not isinstance(comm, SimComm):
        raise TypeError(f"{type(comm).__name__} is no simulated communicator")
    return comm


def layers_of(comm: Any) -> list[Wrapper]:
    """The wrappers around a communicator, the innermost first."""
    layers: list[Wrapper] = []
    while isinstance(comm, Wrapper):
        layers.insert(0, comm)
        comm = comm._inner
    return layers


def post(
    comm: Any, call: Call, start: Callable[[SimComm], Flight]
) -> tuple[Callable[[float | None], object], Flight]:
    """Start a call that is waited for later, as the wrappers of `comm` see it.

    Returns how to wait for it, and what the kernel waits for.
    """
    inner = innermost(comm)
    flights: list[Flight] = []

    def begin() -> Any:
        kernel = inner.group.kernel
        kernel.enter()
        kernel.at_work = True
        try:
            flights.append(start(inner))
        finally:
            kernel.at_work = False
        peer = call.dst if call.dst is not None else call.src
        return SimWork(inner, flights[0], peer, flights[0].call()["n"])

    for layer in layers_of(comm):
        begin = partial(layer._around, call, begin)
    return begin().wait, flights[0]


def group_of(world: Group, name: str, members: Sequence[int]) -> Group:
    """The group of those members of the world that torch calls `name`.

    torch gives a name again after destroy_process_group, perhaps to other members.
    """
    return world.subgroup(("torch", name, tuple(members)), members)


def subgroup(comm: Any, name: str, members: list[int]) -> Any:
    """This rank's communicator in a group that torch calls `name`.

    Unlike `new_group` it needs nobody: torch makes a group without a meeting.
    """
    outer = innermost(comm)
    group = group_of(outer.group, name, members)
    made: Any = SimComm(group, members.index(outer.rank), outer._limit_s)
    for layer in layers_of(comm):
        if isinstance(layer, Journal):
            made = Journal(
                made, layer._sink, group=name, members=members, counter=layer._counter
            )
        else:
            made = layer._wrap_group(made, members)
    return made
