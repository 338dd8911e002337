"""Write down the calls of torch.distributed that a rank makes, and where it waits.

How this works. Torch's flight recorder lists every collective with its group, number
and sizes, also those that DDP starts from C++. It knows neither the script's lines nor
messages between two ranks, nor which call a thread waits for. So we wrap the methods
through which Python reaches C++:

    ProcessGroup.allreduce, …   notes the line; compares the call with the other ranks'
    ProcessGroup.send, recv     counts the messages of each channel
    Work.wait, Store.get, …     sits the thread down in the call that it waits for
    init_process_group, …       all ranks must come, as to a collective
    backward() through DDP      compared like a call, because it makes some from C++

A wrapper costs a few microseconds and changes no argument. Processes that the rank
forks, such as a DataLoader's workers, don't write anything down.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import CodeType
from typing import Any, cast

from distlab.recorder.frames import Place, place_of

ANY = -1
BACKWARD = "backward"
KEPT = 64  # newest messages of a channel, and pseudo-collectives of a kind
KEPT_CALLS = 512
_LONG = timedelta(minutes=1)

Channel = tuple[str, int, int, int]
"""Group, source, destination and tag; the ranks are those of the whole job."""

Sizes = list[list[int]]

_COLLECTIVES = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "scatter": "scatter",
}
"""Methods of torch's ProcessGroup, and the functions that users call for them."""


@dataclass(slots=True, eq=False)
class Act:
    """One call of this rank. `number` counts the like calls of its group or channel.

    The flight recorder numbers the collectives, and what it has recorded between
    `created_ns` and `issued_ns` belongs to one.
    """

    kind: str  # "collective", "send", "recv", "meeting", "store" or "unfinished"
    op: str
    group: str = ""
    number: int = 0
    channel: Channel | None = None
    members: tuple[int, ...] = ()
    inputs: Sizes = field(default_factory=list)
    outputs: Sizes = field(default_factory=list)
    dtype: str = ""
    root: int | None = None
    reduce_op: str = ""
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    """Of an all-to-all: elements from and for each member."""
    place: Place | None = None
    created_ns: int = 0
    issued_ns: int = 0
    gives_up: bool = False
    """It has a timeout of its own, under a minute."""
    done: bool = False
    failed: bool = False
    """It has raised the error that ends the rank."""
    others: list[dict[str, Any]] = field(default_factory=list)
    """The calls of other ranks with which this one disagrees."""


@dataclass(slots=True)
class Messages:
    """The sends or the receives of a channel: their number, and the newest."""

    count: int = 0
    newest: deque[Act] = field(default_factory=lambda: deque(maxlen=KEPT))


class Journal:
    """What this process has called and where its threads wait."""

    def __init__(self) -> None:
        self.active = True
        self.num_events = 0
        self.has_begun = False  # init_process_group was called
        self.seats: dict[int, list[Act]] = {}  # by thread
        self.callers: set[int] = set()  # threads that have made a call
        self.calls: deque[Act] = deque(maxlen=KEPT_CALLS)
        self.sends: dict[Channel, Messages] = {}
        self.recvs: dict[Channel, Messages] = {}
        self.meetings: deque[Act] = deque(maxlen=KEPT)
        self.groups: dict[str, tuple[int, ...]] = {}
        self.exempt: set[int] = set()  # our own threads
        self.has_left = False  # destroyed its groups: it can't take part any more
        self.compare: Callable[[Act], None] | None = None
        self._works: weakref.WeakKeyDictionary[Any, Act] = weakref.WeakKeyDictionary()
        self._num_meetings: dict[str, int] = {}
        self._wrappers: set[CodeType] = set()
        # By thread: the group in which the next backward() reduces gradients.
        self._reduces: dict[int, Any] = {}
        os.register_at_fork(after_in_child=self._stop)

    def _stop(self) -> None:
        self.active = False

    def attach(self, c10d: Any) -> None:
        """Wrap the methods of torch's C++ classes; `c10d` is distributed_c10d."""
        group, work, store = c10d.ProcessGroup, c10d.Work, c10d.Store
        for name, op in _COLLECTIVES.items():
            self._wrap(group, name, functools.partial(self._collective, op), self._sent)
        for name in ("send", "recv", "recv_anysource"):
            self._wrap(group, name, functools.partial(self._message, name), self._sent)
        self._wrap(group, "monitored_barrier", self._monitored_barrier, _ended)
        self._wrap(work, "wait", self._wait, self._waited)
        for name in ("get", "wait", "multi_get"):
            self._wrap(store, name, functools.partial(self._of_store, name), _ended)
        self._wrap(c10d, "_new_group_with_tag", self._new_group, self._grouped)
        self._wrap(c10d, "init_process_group", self._init, self._met)
        self._wrap(c10d, "destroy_process_group", self._leave, self._left)

    def _wrap(
        self, owner: Any, name: str, begin: Callable[..., Act], end: Callable[..., None]
    ) -> None:
        """Have `begin` describe each call of a function, and `end` note its result.

        Whatever goes wrong in the two, the script's own call goes on.
        """
        own = getattr(owner, name, None)
        if own is None:  # another version of torch
            return

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if not self.active or thread in self.exempt:
                return own(*args, **kwargs)
            try:
                act = begin(*args, **kwargs)
            except Exception:
                return own(*args, **kwargs)
            seats = self.sit_down(act)
            try:
                result = own(*args, **kwargs)
            except BaseException:
                # Or what torch records later would belong to this call.
                act.issued_ns = act.issued_ns or time.time_ns()
                raise
            finally:
                self.num_events += 1
                seats.remove(act)
            with contextlib.suppress(Exception):
                end(act, result, *args)
            return result

        self._note_wrapper(wrapped)
        setattr(owner, name, wrapped)
        face = sys.modules.get("torch.distributed")  # if torch was imported before us
        if getattr(face, name, None) is own:
            setattr(face, name, wrapped)

    def _note_wrapper(self, function: Any) -> None:
        """Have errors found that pass through this function; `act` is its call."""
        self._wrappers.add(function.__code__)

    def raised_in(self, error: BaseException) -> Act | None:
        """Return the call that has raised an error, or the error behind it."""
        for one in (error, error.__cause__, error.__context__):
            trace = one.__traceback__ if one is not None else None
            while trace is not None:
                if trace.tb_frame.f_code in self._wrappers:
                    return cast("Act | None", trace.tb_frame.f_locals.get("act"))
                trace = trace.tb_next
        return None

    def attach_ddp(self, module: Any) -> None:
        """Have a backward() that reduces DDP's gradients compared between the ranks."""
        import torch

        ddp = module.DistributedDataParallel
        own_forward, own_backward = ddp.forward, torch.autograd.backward

        @functools.wraps(own_forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = own_forward(model, *args, **kwargs)
            with contextlib.suppress(Exception):
                reduces = torch.is_grad_enabled() and model.require_backward_grad_sync
                # Under join(), a rank without data answers the others' calls.
                if self.active and reduces and not model._join_config.enable:
                    self._reduces[threading.get_ident()] = model.process_group
            return result

        @functools.wraps(own_backward)
        def backward(*args: Any, **kwargs: Any) -> Any:
            group = self._reduces.pop(threading.get_ident(), None)
            act = None
            if group is not None and self.active:
                with contextlib.suppress(Exception):
                    act = self._backward(group)
            try:
                return own_backward(*args, **kwargs)
            finally:
                if act is not None:
                    act.issued_ns = time.time_ns()

        self._note_wrapper(backward)
        ddp.forward, torch.autograd.backward = forward, backward
        verify = "_verify_params_across_processes"
        self._wrap(torch.distributed, verify, self._verify, _verified)

    def _backward(self, group: Any) -> Act:
        return self._as_one(BACKWARD, group)

    def _verify(self, group: Any, tensors: Any, *_: Any, **__: Any) -> Act:
        """DDP's constructor compares the shapes of the parameters, and sends them."""
        sizes, dtype = _sizes([tensors])
        inputs = [[sum(map(math.prod, sizes))]]
        return self._as_one("DistributedDataParallel", group, inputs, dtype)

    def _as_one(
        self, op: str, group: Any, inputs: Sizes | None = None, dtype: str = ""
    ) -> Act:
        """Several calls that torch makes from C++, compared like one."""
        act = Act(
            BACKWARD,
            op,
            group.group_name,
            members=self.ranks_of(group),
            inputs=inputs or [],
            dtype=dtype,
            place=place_of(sys._getframe(1)),
        )
        if self.compare is not None:
            act.created_ns = time.time_ns()  # in case it's held back here
            self.compare(act)
        act.created_ns = time.time_ns()
        self.calls.append(act)
        return act

    # ── where a thread waits ────────────────────────────────────────────────────────

    def sit_down(self, act: Act) -> list[Act]:
        """Note that this thread waits in a call now; return all those it waits in."""
        thread = threading.get_ident()
        seats = self.seats.setdefault(thread, [])
        self.callers.add(thread)
        seats.append(act)
        self.num_events += 1
        return seats

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        """Return the members of a group, as ranks of the whole job."""
        name = group.group_name
        if name not in self.groups:
            import torch.distributed as dist

            try:
                self.groups[name] = tuple(dist.get_process_group_ranks(group))
            except Exception:  # a group that torch doesn't list, such as a test's
                self.groups[name] = tuple(range(group.size()))
        return self.groups[name]

    def learn_groups(self) -> None:
        """Note the members of all groups that torch knows."""
        from torch.distributed import distributed_c10d

        for group in list(distributed_c10d._world.pg_names):
            self.ranks_of(group)

    # ── the calls ───────────────────────────────────────────────────────────────────

    def _collective(self, op: str, group: Any, *args: Any, **kw: Any) -> Act:
        members = self.ranks_of(group)
        options = kw.get("opts", args[-1] if args else None)
        root = getattr(options, "rootRank", None)
        outputs, dtype = _sizes(args[:1])
        inputs, its_dtype = _sizes(args[1:2]) if op in _TWO_SIDED else (outputs, dtype)
        reduce_op = getattr(options, "reduceOp", None) if op in _REDUCING else None
        act = Act(
            "collective",
            op,
            group.group_name,
            members=members,
            inputs=inputs,
            outputs=outputs,
            dtype=dtype or its_dtype,
            root=members[root] if isinstance(root, int) and op in _ROOTED else None,
            reduce_op=str(getattr(reduce_op, "op", reduce_op) or "").rpartition(".")[2],
            place=place_of(sys._getframe(1)),
        )
        if op in _EXCHANGES:
            act.takes, act.gives = _exchanged(args, len(members))
        if self.compare is not None:
            act.created_ns = time.time_ns()  # in case it's held back here
            self.compare(act)
        act.created_ns = time.time_ns()
        self.calls.append(act)
        return act

    def _message(self, name: str, group: Any, *args: Any, **kw: Any) -> Act:
        members = self.ranks_of(group)
        me = members[group.rank()]
        peer = ANY
        if name != "recv_anysource":
            given = args[1] if len(args) > 1 else kw.get("dstRank", kw.get("srcRank"))
            peer = members[int(given)]  # type: ignore[arg-type]
        tag = int(args[-1]) if len(args) > 1 else int(kw.get("tag", 0))
        op = "send" if name == "send" else "recv"
        ends = (me, peer) if op == "send" else (peer, me)
        channel = (group.group_name, *ends, tag)
        log = self._log(op, channel)
        log.count += 1
        sizes, dtype = _sizes(args)
        act = Act(
            op,
            op,
            group.group_name,
            number=log.count,
            channel=channel,
            members=members,
            inputs=sizes if op == "send" else [],
            outputs=sizes if op == "recv" else [],
            dtype=dtype,
            place=place_of(sys._getframe(1)),
            created_ns=time.time_ns(),
        )
        log.newest.append(act)
        return act

    def _log(self, op: str, channel: Channel) -> Messages:
        logs = self.sends if op == "send" else self.recvs
        return logs.setdefault(channel, Messages())

    def _sent(self, act: Act, work: Any, *_: Any) -> None:
        """The call is issued: from now on its Work stands for it."""
        act.issued_ns = time.time_ns()
        if work is not None:
            self._works[work] = act

    def _monitored_barrier(self, group: Any, *args: Any, **kw: Any) -> Act:
        timeout = args[0] if args else kw.get("timeout")
        name, ranks = f"monitored barriers of {group.group_name}", self.ranks_of(group)
        act = self._meeting("monitored_barrier", name, ranks)
        # torch passes the group's own timeout where the user gave none.
        act.gives_up = _is_short(timeout)
        return act

    def _new_group(self, ranks: Any = None, *_: Any, **kw: Any) -> Act:
        world = self._world()
        members = world if ranks is None else tuple(ranks)
        is_local = bool(kw.get("use_local_synchronization"))
        name = f"new groups of {list(members)}" if is_local else "new groups"
        op = f"new_group({list(members)})"
        return self._meeting(op, name, members if is_local else world)

    def _init(self, *_: Any, **kw: Any) -> Act:
        self.has_begun, self.has_left = True, False
        size = kw.get("world_size", -1)
        size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        return self._meeting("init_process_group", "init", tuple(range(size)))

    def _leave(self, *_: Any, **__: Any) -> Act:
        place = place_of(sys._getframe(1))
        return Act("unfinished", "destroy_process_group", place=place)

    def _left(self, *_: Any) -> None:
        self.has_left = not self._world()

    def _met(self, act: Act, *_: Any) -> None:
        act.done = True
        self.learn_groups()
        self.after_init()

    def _grouped(self, act: Act, *_: Any) -> None:
        act.done = True
        self.learn_groups()  # torch forgets a group when it is destroyed

    def after_init(self) -> None:
        """Do whatever needs the job's store; see `attach`."""

    def _meeting(self, op: str, name: str, members: tuple[int, ...]) -> Act:
        number = self._num_meetings[name] = self._num_meetings.get(name, 0) + 1
        place, now = place_of(sys._getframe(1)), time.time_ns()
        act = Act(
            "meeting",
            op,
            name,
            number,
            members=members,
            place=place,
            created_ns=now,
        )
        self.meetings.append(act)
        return act

    def _world(self) -> tuple[int, ...]:
        import torch.distributed as dist

        return tuple(range(dist.get_world_size())) if dist.is_initialized() else ()

    # ── the waits ───────────────────────────────────────────────────────────────────

    def _wait(self, work: Any, *args: Any, **kw: Any) -> Act:
        act = self._works.get(work)
        timeout = args[0] if args else kw.get("timeout")
        if act is None:  # started from C++
            act = Act("unfinished", "wait", place=place_of(sys._getframe(1)))
        act.gives_up = _is_short(timeout)
        return act

    def _waited(self, act: Act, _: Any, work: Any, *__: Any) -> None:
        act.done = True
        if act.channel is None or act.channel[1] != ANY:
            return
        # A receive from any rank is over: count it for the rank that has sent.
        group, _any, me, tag = act.channel
        source = act.members[work._source_rank()]
        self.recvs[act.channel].count -= 1
        self.recvs[act.channel].newest.remove(act)
        act.channel = (group, source, me, tag)
        log = self._log("recv", act.channel)
        log.count += 1
        act.number = log.count
        log.newest.append(act)

    def _of_store(self, name: str, _: Any, *args: Any, **kw: Any) -> Act:
        keys = args[0] if args else next(iter(kw.values()), "")
        timeout = args[1] if len(args) > 1 else kw.get("timeout")
        return Act(
            "store",
            f"store.{name}",
            group=keys if isinstance(keys, str) else ", ".join(map(str, keys)),
            place=place_of(sys._getframe(1)),
            created_ns=time.time_ns(),
            gives_up=_is_short(timeout),
        )


def _is_short(timeout: Any) -> bool:
    """Return True if a call gives up so soon that waiting for it is no hang.

    Torch passes a group's own timeout, or a negative one, where the user gave none.
    """
    if not isinstance(timeout, timedelta):
        return False
    return timedelta(0) < timeout < _LONG


def _verified(act: Act, *_: Any) -> None:
    act.done, act.issued_ns = True, time.time_ns()


def _ended(act: Act, *_: Any) -> None:
    act.done = True


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_TWO_SIDED = (
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor"),
)


def _sizes(values: Sequence[Any]) -> tuple[Sizes, str]:
    """Return the sizes of all tensors in a call's arguments, and the first dtype."""
    sizes: Sizes = []
    dtypes: list[str] = []

    def take(value: Any) -> None:
        if isinstance(value, list | tuple):
            for inner in value:
                take(inner)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            sizes.append(list(value.shape))
            dtypes.append(str(value.dtype).removeprefix("torch."))

    for value in values:
        take(value)
    return sizes, dtypes[0] if dtypes else ""


def _exchanged(args: Sequence[Any], num_members: int) -> tuple[list[int], list[int]]:
    """Return how many elements an all-to-all takes from, and gives to, each member."""
    found: list[list[int]] = []
    for side, splits in ((0, 2), (1, 3)):
        value = args[side] if len(args) > side else []
        if isinstance(value, list | tuple):
            found.append([tensor.numel() for tensor in value])
            continue
        rows = value.shape[0] if value.dim() else 1
        given = args[splits] if len(args) > splits else None
        each = list(given) if given else [rows // num_members] * num_members
        found.append([num * (value.numel() // max(1, rows)) for num in each])
    return found[0], found[1]
