"""Journal, ByteMeter and PointToPointOnly: what they note, count and refuse.

They are wrapped around a Comm of the imagination, so that a call costs nothing and the
world can have any size; one test at the end stacks all of them on real ranks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.comm import (
    ANY,
    COLLECTIVES,
    ByteMeter,
    Call,
    Comm,
    CommRefusedError,
    Event,
    Journal,
    PeerLost,
    PointToPointOnly,
    ReduceOp,
    Traffic,
    Work,
    Wrapper,
)
from distlab.runner import Cluster, RankContext
from tests.workbench.naming import named


class FakeWork:
    def __init__(self, comm: FakeComm) -> None:
        self._comm = comm

    def wait(self, timeout_s: float | None = None) -> None:
        self._comm.seen.append(("wait", timeout_s))
        if self._comm.broken:
            raise PeerLost(self._comm.rank, 3, 1, 0.5)


class FakeComm:
    """Every call succeeds at once (or, if `broken`, loses its peer)."""

    def __init__(self, rank: int = 0, world_size: int = 4) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, rank
        self.device = torch.device("cpu")
        self.seen: list[tuple[Any, ...]] = []
        self.broken = False
        self.aborted = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in {*COLLECTIVES, "send", "sendrecv"}:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> FakeWork | None:
            self.seen.append((name, *args, *kwargs.items()))
            if self.broken:
                raise PeerLost(self.rank, 3, 1, 0.5)
            is_started = any(value is True for value in args)
            return FakeWork(self) if is_started else None

        return call

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        self.seen.append(("recv", tensor, src, tag, timeout_s))
        return 2 if src == ANY else src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> FakeWork:
        return FakeWork(self)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> FakeWork:
        return FakeWork(self)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> FakeWork | None:
        return FakeWork(self) if async_op else None

    def new_group(self, ranks: Sequence[int]) -> FakeComm | None:
        if any(rank >= self.world_size for rank in ranks):
            raise CommRefusedError("no such rank")
        if self.rank not in ranks:
            return None
        return FakeComm(list(ranks).index(self.rank), len(ranks))

    def time(self) -> float:
        return 12.5

    def abort(self) -> None:
        self.aborted = True


def journalled(rank: int = 0, world_size: int = 4) -> tuple[Journal, list[Event]]:
    events: list[Event] = []
    return Journal(FakeComm(rank, world_size), events.append), events


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# every call of Comm that moves data, as (name, what to do), on 4 ranks with 8 floats
CALLS: dict[str, Callable[[Comm], object]] = {
    "send": lambda comm: comm.send(torch.zeros(8), 1),
    "isend": lambda comm: comm.isend(torch.zeros(8), 1),
    "recv": lambda comm: comm.recv(torch.zeros(8), 1),
    "irecv": lambda comm: comm.irecv(torch.zeros(8), 1),
    "sendrecv": lambda comm: comm.sendrecv(torch.zeros(8), 1, torch.zeros(8), 3),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(torch.zeros(8), 0),
    "all_reduce": lambda comm: comm.all_reduce(torch.zeros(8)),
    "reduce": lambda comm: comm.reduce(torch.zeros(8), 0),
    "all_gather": lambda comm: comm.all_gather(torch.zeros(32), torch.zeros(8)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(torch.zeros(2), torch.zeros(8)),
    "all_to_all": lambda comm: comm.all_to_all(torch.zeros(8), torch.zeros(8)),
    "new_group": lambda comm: comm.new_group([0, 1]),
}


def test_the_table_of_calls_is_complete() -> None:
    silent = {"rank", "world_size", "local_rank", "device", "time", "abort"}
    assert set(CALLS) == {n for n in vars(Comm) if n[0] != "_"} - silent
    assert set(CALLS) >= COLLECTIVES


# ── Journal ─────────────────────────────────────────────────────────────────────────


def test_a_blocking_call_is_written_before_and_after() -> None:
    comm, events = journalled()
    comm.send(torch.zeros(2, 4, dtype=torch.float64), 3, 9)
    comm.barrier()
    assert [(e["k"], e["n"]) for e in events] == [
        ("enter", 1),
        ("exit", 1),
        ("enter", 2),
        ("exit", 2),
    ]
    sent = events[0]
    assert (sent["op"], sent["dst"], sent["src"], sent["tag"]) == ("send", 3, None, 9)
    assert (sent["shape"], sent["dtype"], sent["bytes"]) == ([2, 4], "float64", 64)
    assert (sent["group"], sent["members"]) == ("world", [0, 1, 2, 3])
    assert (sent["into_shape"], events[2]["bytes"]) == (None, 0)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_written_down_with_its_line(name: str) -> None:
    comm, events = journalled()
    CALLS[name](comm)
    assert events[0]["op"] == name
    assert Path(events[0]["file"]) == Path(__file__)
    source = Path(__file__).read_text().splitlines()[events[0]["line"] - 1]
    assert f"comm.{name}(" in source
    assert (events[0]["k"] == "post") == (name in {"isend", "irecv"})


def test_the_call_site_is_the_callers_through_other_wrappers() -> None:
    events: list[Event] = []
    stack = PointToPointOnly(Journal(ByteMeter(FakeComm()), events.append))
    line = here() + 1
    stack.send(torch.zeros(1), 1)
    work = stack.isend(torch.zeros(1), 1)
    work.wait()
    entered, _, posted, waited, _ = events
    assert [e["line"] for e in (entered, posted, waited)] == [line, line + 1, line + 2]
    assert {e["file"] for e in (entered, posted, waited)} == {__file__}


def test_posted_calls_are_waited_for_by_their_number() -> None:
    comm, events = journalled()
    first = comm.isend(torch.zeros(1), 1)
    second = comm.all_reduce(torch.zeros(1), async_op=True)
    assert second is not None
    second.wait(0.25)
    first.wait()
    assert [(e["k"], e["n"]) for e in events] == [
        ("post", 1),
        ("post", 2),
        ("wait", 2),
        ("exit", 2),
        ("wait", 1),
        ("exit", 1),
    ]
    assert [e["timeout_s"] for e in events if e["k"] == "wait"] == [0.25, None]


STARTS: dict[str, Callable[[Comm], Work | None]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.zeros(8), async_op=True),
    "all_gather": lambda comm: comm.all_gather(
        torch.zeros(32), torch.zeros(8), async_op=True
    ),
    "reduce_scatter": lambda comm: comm.reduce_scatter(
        torch.zeros(2), torch.zeros(8), async_op=True
    ),
    "all_to_all": lambda comm: comm.all_to_all(
        torch.zeros(8), torch.zeros(8), async_op=True
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_started_collective_is_posted_metered_and_waited_for(name: str) -> None:
    events: list[Event] = []
    traffic, alone = Traffic(), Traffic()
    work = STARTS[name](Journal(ByteMeter(FakeComm(), traffic), events.append))
    assert work is not None
    assert [(e["k"], e["op"]) for e in events] == [("post", name)]
    work.wait(0.5)
    assert [e["k"] for e in events] == ["post", "wait", "exit"]
    CALLS[name](ByteMeter(FakeComm(), alone))
    assert traffic.sent_bytes == alone.sent_bytes > 0
    assert traffic.messages == 1


def test_a_blocking_all_reduce_is_no_posted_call() -> None:
    comm, events = journalled()
    assert comm.all_reduce(torch.zeros(3), ReduceOp.MAX) is None
    assert [e["k"] for e in events] == ["enter", "exit"]
    assert events[0]["reduce"] == "max"


@pytest.mark.parametrize(
    "name", sorted(set(CALLS) - {"isend", "irecv", "all_reduce", "new_group"})
)
def test_the_limit_of_a_wait_is_passed_on_and_written_down(name: str) -> None:
    inner, events = FakeComm(), list[Event]()
    comm = Journal(inner, events.append)
    arguments: dict[str, tuple[Any, ...]] = {
        "send": (torch.zeros(1), 1),
        "recv": (torch.zeros(1), 1),
        "sendrecv": (torch.zeros(1), 1, torch.zeros(1), 3),
        "barrier": (),
        "broadcast": (torch.zeros(1), 0),
        "reduce": (torch.zeros(1), 0),
        "all_gather": (torch.zeros(4), torch.zeros(1)),
        "reduce_scatter": (torch.zeros(1), torch.zeros(4)),
        "all_to_all": (torch.zeros(4), torch.zeros(4)),
    }
    getattr(comm, name)(*arguments[name], timeout_s=0.75)
    assert events[0]["timeout_s"] == 0.75
    assert inner.seen[0][-1] in (0.75, ("timeout_s", 0.75))


def test_any_source_is_named_afterwards() -> None:
    comm, events = journalled()
    assert comm.recv(torch.zeros(1)) == 2
    assert (events[0]["src"], events[1]["src"]) == (ANY, 2)


def test_a_failure_is_noted_and_passed_on() -> None:
    inner, events = FakeComm(), list[Event]()
    comm = Journal(inner, events.append)
    work = comm.isend(torch.zeros(1), 1)
    inner.broken = True
    with pytest.raises(PeerLost):
        comm.send(torch.zeros(1), 1)
    with pytest.raises(PeerLost):
        work.wait()
    with pytest.raises(CommRefusedError):
        comm.new_group([0, 9])
    errors = [e for e in events if e["k"] == "error"]
    assert [(e["n"], e["type"], e["refused"]) for e in errors] == [
        (2, "PeerLost", False),
        (1, "PeerLost", False),
        (3, "CommRefusedError", True),
    ]
    assert named(errors[0]["message"], "rank 0", "rank 1", "#3", "0.50")


def test_groups_are_told_in_ranks_of_the_world() -> None:
    comm, events = journalled(rank=3)
    group = comm.new_group([3, 1, 2])
    assert group is not None
    assert group.rank == 0
    group.send(torch.zeros(1), 2)
    group.broadcast(torch.zeros(1), 1)
    assert group.recv(torch.zeros(1)) == 2
    inner = group.new_group([0, 2])
    assert inner is not None
    inner.send(torch.zeros(1), 1)
    entered = {(e["op"], e["n"]): e for e in events if e["k"] == "enter"}
    assert entered["send", 2]["dst"] == 2
    assert entered["send", 2]["members"] == [3, 1, 2]
    assert entered["broadcast", 3]["root"] == 1
    assert [e["src"] for e in events if e["k"] == "exit" and e["n"] == 4] == [2]
    assert entered["send", 6]["dst"] == 2
    assert entered["send", 6]["members"] == [3, 2]
    groups = [entered[key]["group"] for key in (("send", 2), ("send", 6))]
    assert groups == ["world/1:3,1,2", "world/1:3,1,2/1:3,2"]


def test_a_group_has_one_name_on_all_its_members() -> None:
    """Rank 1 is not in the first group; it must count it all the same."""
    names = []
    for rank in (0, 1):
        comm, events = journalled(rank)
        comm.new_group([0, 2])
        with pytest.raises(CommRefusedError):
            comm.new_group([0, 1, 9])  # refused on all: no group, and not counted
        pair = comm.new_group([0, 1])
        assert pair is not None
        pair.barrier()
        names.append(events[-2]["group"])
    assert names == ["world/2:0,1", "world/2:0,1"]


def test_threads_do_not_share_a_number_and_are_told_apart() -> None:
    comm, events = journalled()
    gate = threading.Barrier(4)

    def talk() -> None:
        gate.wait()
        for _ in range(50):
            comm.send(torch.zeros(1), 1)

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entered = [e for e in events if e["k"] == "enter"]
    assert sorted(e["n"] for e in entered) == list(range(1, 201))
    assert len({e["thread"] for e in entered}) == 4
    assert all(e["threads"] >= 2 for e in entered)


# ── ByteMeter ───────────────────────────────────────────────────────────────────────

S = 8 * 4  # bytes of the 8 floats that the calls of the table send


@pytest.mark.parametrize(
    ("name", "at_root", "elsewhere"),
    [
        ("send", S, S),
        ("isend", S, S),
        ("recv", 0, 0),
        ("irecv", 0, 0),
        ("sendrecv", S, S),
        ("barrier", 0, 0),
        ("broadcast", 3 * S, 0),
        ("all_reduce", 2 * 3 / 4 * S, 2 * 3 / 4 * S),
        ("reduce", 0, S),
        ("all_gather", 3 * S, 3 * S),
        ("reduce_scatter", 3 / 4 * S, 3 / 4 * S),
        ("all_to_all", 3 / 4 * S, 3 / 4 * S),
        ("new_group", 0, 0),
    ],
)
def test_bytes_are_counted_by_the_stated_formula(
    name: str, at_root: float, elsewhere: float
) -> None:
    for rank, expected in ((0, at_root), (2, elsewhere)):
        meter = ByteMeter(FakeComm(rank))
        CALLS[name](meter)
        assert meter.traffic.sent_bytes == expected
        assert meter.traffic.messages == (expected > 0)


def test_alone_nothing_is_sent() -> None:
    meter = ByteMeter(FakeComm(0, 1))
    x = torch.zeros(8)
    meter.all_reduce(x)
    meter.all_gather(torch.zeros(8), x)
    meter.sendrecv(x, 0, torch.zeros(8), 0)
    assert (meter.traffic.messages, meter.traffic.sent_bytes) == (0, 0)


def test_a_failed_call_is_not_counted_but_its_time_is() -> None:
    inner = FakeComm()
    inner.broken = True
    meter = ByteMeter(inner)
    with pytest.raises(PeerLost):
        meter.send(torch.zeros(8), 1)
    assert meter.traffic.sent_bytes == 0
    assert meter.traffic.in_calls_s > 0


def test_traffic_of_groups_goes_into_the_same_total() -> None:
    meter = ByteMeter(FakeComm(), Traffic(messages=5, sent_bytes=100.0))
    pair = meter.new_group([0, 1])
    assert pair is not None
    pair.all_reduce(torch.zeros(8))  # two ranks: 2 · 1/2 · S
    pair.send(torch.zeros(2), 1)
    assert meter.traffic.sent_bytes == 100 + S + 8
    assert meter.traffic.messages == 7


def test_waiting_counts_as_time_in_calls() -> None:
    inner = FakeComm()
    meter = ByteMeter(inner)
    work = meter.isend(torch.zeros(8), 1)
    before_s = meter.traffic.in_calls_s
    work.wait(0.5)
    assert inner.seen == [("wait", 0.5)]
    assert meter.traffic.in_calls_s > before_s


# ── PointToPointOnly ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_collectives_are_refused_with_a_sentence(name: str) -> None:
    inner = FakeComm()
    comm = PointToPointOnly(inner, building="all_reduce")
    with pytest.raises(CommRefusedError) as refused:
        CALLS[name](comm)
    assert refused.value.kind == "collective"
    ways = ("send", "recv", "isend", "irecv", "sendrecv")
    assert named(str(refused.value), "all_reduce", f"comm.{name}", *ways)
    assert inner.seen == []


@pytest.mark.parametrize("name", sorted(set(CALLS) - COLLECTIVES))
def test_point_to_point_passes(name: str) -> None:
    events: list[Event] = []
    comm = PointToPointOnly(Journal(FakeComm(), events.append))
    CALLS[name](comm)
    assert events[0]["op"] == name


# ── all wrappers ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrap", [ByteMeter, PointToPointOnly])
def test_the_rest_of_comm_passes_through(wrap: Callable[[Comm], Wrapper]) -> None:
    inner = FakeComm(2, 5)
    comm = wrap(inner)
    assert (comm.rank, comm.world_size, comm.local_rank) == (2, 5, 2)
    assert (comm.device, comm.time()) == (torch.device("cpu"), 12.5)
    assert comm.recv(torch.zeros(1)) == 2
    comm.abort()
    assert inner.aborted


def test_a_wrapper_sees_a_whole_call() -> None:
    seen: list[Call] = []

    class Watcher(Wrapper):
        def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
            seen.append(call)
            return proceed()

    mine, theirs = torch.zeros(3), torch.ones(3)
    Watcher(FakeComm()).sendrecv(mine, 1, theirs, 3, timeout_s=2.0)
    assert seen[0].sent is mine
    assert seen[0].received is theirs
    assert (seen[0].dst, seen[0].src, seen[0].timeout_s) == (1, 3, 2.0)


def stacked(ctx: RankContext) -> list[Any]:
    comm = PointToPointOnly(ctx.comm, building="ring")
    box = torch.zeros(3)
    if comm.rank == 0:
        comm.send(torch.ones(3), 1)
    else:
        comm.recv(box, 0)
    try:
        comm.barrier()
    except CommRefusedError as error:
        return [float(box.sum()), "ring" in str(error), ctx.traffic.sent_bytes]
    return []


def test_the_stack_on_real_ranks(cluster: Cluster) -> None:
    run = cluster.run(stacked, 2).require_finished()
    assert run.values == [
        [0.0, True, 12.0],
        [3.0, True, 0.0],
    ]
    assert [e["op"] for record in run.ranks for e in record.calls()] == ["send", "recv"]
    assert [record.sent_bytes for record in run.ranks] == [12.0, 0.0]
