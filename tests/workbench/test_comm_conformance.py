"""Every transport keeps the contract of `Comm`: the same programs, the same values."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distlab.runner import Cluster, Limits, Run
from distlab.sim import run_apart
from tests.workbench.conformance import programs
from tests.workbench.golden import Golden
from tests.workbench.naming import named

WORLDS = (1, 2, 3, 4)
AT_LEAST_2 = (2, 3, 4)


# What the tests of other transports ask for, and NCCL does not have.
_NO_TAGS, _NO_ANYONE = "NCCL has no tags", "NCCL cannot receive from anyone"
_NO_LIMIT = "NCCL does not bound the first contact of two ranks"
NOT_IN_NCCL = {
    "test_tags_may_be_taken_out_of_order": _NO_TAGS,
    "test_a_send_tells_when_it_is_completed": _NO_TAGS,
    "test_any_source_says_who_sent": _NO_ANYONE,
    "test_any_source_in_a_group_is_the_groups_number": _NO_ANYONE,
    "test_an_isend_arrives_though_nobody_keeps_its_work": "it leaves with a later call",
    "test_a_group_and_the_world_are_different_channels": "NCCL connects in one order",
    "test_a_wait_that_runs_out_is_a_lost_peer": _NO_LIMIT,
    "test_no_time_at_all_is_not_for_ever": _NO_LIMIT,
    "test_abort_wakes_who_waits": _NO_LIMIT,
    "test_send_is_synchronous_at_every_size": "NCCL raises where gloo would wait",
}


@dataclass(frozen=True)
class Transport:
    """A row of the table: how a program is run on it, and why it may be absent."""

    name: str
    why_not: Callable[[], str]  # empty where it can be used

    def run(
        self,
        cluster: Cluster,
        program: Any,
        world_size: int,
        *args: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> Run:
        how: dict[str, Any] = {"limits": Limits(seconds=20), "on_report": on_report}
        if self.name == "nccl":
            how["limits"] = Limits(seconds=60, memory_bytes=CUDA_BYTES)
        if self.name == "sim":
            return run_apart(cluster, program, world_size, *args, **how)
        return cluster.run(program, world_size, *args, backend=self.name, **how)


CUDA_BYTES = 4096 << 30  # it reserves addresses that it never uses


def _no_gpus() -> str:
    return "" if torch.cuda.device_count() else "nccl needs a GPU, and here is none"


TRANSPORTS = (
    Transport("gloo", lambda: ""),
    Transport("tcp", lambda: ""),
    Transport("nccl", _no_gpus),
    Transport("sim", lambda: ""),
)

HERE = [transport for transport in TRANSPORTS if not transport.why_not()]
# Simulated ranks have no processes of their own that could die.
PROCESSES = [transport for transport in HERE if transport.name != "sim"]

Start = Callable[..., list[Any]]


@pytest.fixture(params=HERE, ids=lambda transport: transport.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    if chosen.name == "nccl" and request.node.originalname in NOT_IN_NCCL:
        pytest.skip(NOT_IN_NCCL[request.node.originalname])
    return chosen


@pytest.fixture
def start(cluster: Cluster, transport: Transport) -> Start:
    """Run a program to its end on the transport under test; its values by rank."""

    def run(program: Any, world_size: int, *args: Any) -> list[Any]:
        done = transport.run(cluster, program, world_size, *args)
        return done.require_finished().values

    return run


def combined(op: str, world_size: int, size: int) -> list[float]:
    """What a reduction of the programs' `contribution` gives, in plain Python."""
    columns = [[i * (r + 1) for r in range(world_size)] for i in range(1, size + 1)]
    combine: dict[str, Callable[[list[int]], float]] = {
        "SUM": sum,
        "AVG": lambda column: sum(column) / world_size,
        "MIN": min,
        "MAX": max,
        "PRODUCT": lambda column: functools.reduce(operator.mul, column),
    }
    return [float(combine[op](column)) for column in columns]


@pytest.mark.parametrize("listed", TRANSPORTS, ids=lambda transport: transport.name)
def test_each_transport_is_tested_or_says_why_not(listed: Transport) -> None:
    reason = listed.why_not()
    if reason:  # one line for the whole suite, not one for each test
        pytest.skip(reason)
    assert listed in HERE


# ── point to point ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 4])
def test_ranks_know_their_place(start: Start, n: int) -> None:
    places = start(programs.who_am_i, n)
    assert [place[:2] for place in places] == [[rank, n] for rank in range(n)]
    assert {place[3] for place in places} <= {"cpu", "cuda"}


@pytest.mark.parametrize("n", [2, 4, 7])
def test_send_and_recv_carry_values(start: Start, n: int) -> None:
    got = start(programs.everyone_sends_to_zero, n)
    assert got[0] == [[src, 10.0 * src, 10.0 * src] for src in range(1, n)]


def test_tags_may_be_taken_out_of_order(start: Start) -> None:
    assert start(programs.tags_out_of_order, 2)[1] == [3.0, 1.0, 2.0]


def test_a_channel_is_first_in_first_out(start: Start) -> None:
    assert start(programs.first_in_first_out, 2)[1] == [float(i) for i in range(20)]


@pytest.mark.parametrize("n", [2, 4, 7])
def test_any_source_says_who_sent(start: Start, n: int) -> None:
    assert start(programs.from_anyone, n)[0] == [[r, 7.0 * r] for r in range(1, n)]


@pytest.mark.parametrize("n", AT_LEAST_2)
def test_posted_transfers_may_be_waited_for_in_any_order(start: Start, n: int) -> None:
    for rank, turns in enumerate(start(programs.posted_and_waited, n)):
        for turn, got in enumerate(turns):
            assert got == [[p, p + 100.0 * turn] for p in range(n) if p != rank]


def test_an_isend_arrives_though_nobody_keeps_its_work(start: Start) -> None:
    assert start(programs.forgotten_isend, 2)[1] == [0.0, 1.0, 2.0, 3.0]


def test_a_send_tells_when_it_is_completed(start: Start, transport: Transport) -> None:
    tells = (
        transport.name != "gloo"
    )  # torch tells of its sends when they are waited for
    told = start(programs.told_of_completion, 2, 8.0 if tells else 0.1)
    assert told[0] == [False, tells, True]


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_a_ring_of_sendrecv_turns(start: Start, n: int) -> None:
    for rank, seen in enumerate(start(programs.ring_by_sendrecv, n)):
        assert seen == [float((rank - turn) % n) for turn in range(n + 1)]


@pytest.mark.parametrize("n", [1, 3])
def test_sendrecv_with_oneself_is_a_checked_copy(start: Start, n: int) -> None:
    for copied, size, dtype in start(programs.sendrecv_with_itself, n):
        assert copied == [5.0, 5.0, 5.0]
        assert named(size, 1, "float32", 3, "float32")
        assert named(dtype, 3, "float32", 3, "int64")


def test_every_dtype_travels(start: Start) -> None:
    got = start(programs.every_dtype_travels, 2)[1]
    for name, tensor in zip(programs.DTYPES, got, strict=True):
        sample = torch.tensor([[0, 1, 2], [3, 100, 0]]).to(getattr(torch, name))
        assert torch.equal(tensor, sample)
        assert tensor.dtype == sample.dtype


@pytest.mark.parametrize("n", [1, 3])
def test_every_dtype_is_broadcast(start: Start, n: int) -> None:
    for got in start(programs.every_dtype_is_broadcast, n):
        for name, tensor in zip(programs.DTYPES, got, strict=True):
            sample = (torch.tensor([1, 2, 3]) * n).to(getattr(torch, name))
            assert torch.equal(tensor, sample)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_empty_tensors_are_messages_too(start: Start, n: int) -> None:
    assert start(programs.empty_tensors, n) == [[[0, 3], [0, 3]]] * n


@pytest.mark.parametrize("n", [1, 3])
def test_a_tensor_without_dimensions_is_one_element(start: Start, n: int) -> None:
    total = n * (n + 1) / 2
    for rank, got in enumerate(start(programs.a_scalar, n)):
        assert got == [total, n * (rank + 1.0), *(1.0 + r for r in range(n))]


# ── refused ─────────────────────────────────────────────────────────────────────────

VALUES: dict[str, tuple[str, ...]] = {
    "send to self": ("{r}", "sends", "{r}"),
    "recv from self": ("{r}", "receives", "{r}"),
    "isend to self": ("{r}", "sends", "{r}"),
    "send too far": ("sends", "{n}", "{last}"),
    "send below": ("sends", "-2", "{last}"),
    "recv too far": ("receives", "{n_and_3}", "{last}"),
    "irecv from any": ("receives", "-1"),
    "sendrecv to nobody": ("sends", "{n}"),
    "broadcast from nobody": ("broadcasts", "{n}"),
    "reduce to nobody": ("reduces", "-1"),
    "group with nobody": ("group", "{n}"),
    "group of none": ("1",),
    "group with twins": ("[0, 0]",),
    "send column": ("{itself_or_column}",),
    "recv column": ("recv",),
    "sendrecv column": ("sendrecv", ".contiguous()"),
    "broadcast column": ("broadcast", "non-contiguous"),
    "all_reduce column": ("all_reduce", "non-contiguous"),
    "all_gather into column": ("all_gather", "non-contiguous"),
    "not a tensor": ("all_reduce", "tensor", "list"),
    "gather size": ("{twice}", "{twice_and_1}"),
    "scatter size": ("{twice}", "{twice_and_1}"),
    "all_to_all sizes": ("{twice}", "{n}"),
    "average of ints": ("torch.int64",),
    "send sparse": ("{itself_or_sparse}",),
    "all_reduce sparse": ("all_reduce", "torch.sparse_coo"),
}


@pytest.mark.parametrize("n", [1, 3])
def test_mistakes_are_refused_with_a_sentence(
    start: Start, n: int, golden: Golden
) -> None:
    told = start(programs.refused_everywhere, n)
    for rank, texts in enumerate(told):
        facts = {
            "r": rank,
            "n": n,
            "last": n - 1,
            "n_and_3": n + 3,
            "twice": 2 * n,
            "twice_and_1": 2 * n + 1,
            "itself_or_column": rank if n == 1 else "non-contiguous",
            "itself_or_sparse": rank if n == 1 else "torch.sparse_coo",
        }
        for name, values in VALUES.items():
            assert named(texts[name], *(v.format(**facts) for v in values)), texts[name]
        if n > 1:
            assert named(texts["all_to_all uneven"], n)
        assert texts["afterwards"] == str(n)
    if n == 3:  # by all transports with the same words
        golden("comm/refusals", "\n".join(f"{k}: {v}" for k, v in told[0].items()))


# ── collectives ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 4])
def test_a_barrier_waits_for_the_last(start: Start, n: int) -> None:
    times = start(programs.barrier_waits, n)
    last_came = max(came for came, _ in times)
    assert all(through >= last_came for _, through in times)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_broadcast_from_each_rank(start: Start, n: int) -> None:
    assert start(programs.broadcast_from_each, n) == [
        [[101.0 * src] * 4 for src in range(n)] for _ in range(n)
    ]


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce(start: Start, n: int) -> None:
    expected = {
        f"{op} {async_op}": [float(async_op), *combined(op, n, 7)]
        for op in programs.OPS
        for async_op in (False, True)
    }
    assert start(programs.all_reduce_with_each, n) == [expected] * n


@pytest.mark.parametrize("n", [1, 3])
def test_views_are_what_they_say(start: Start, n: int) -> None:
    numbers = {
        "conj": [[1.0, -r - 1.0] for r in range(n)],
        "neg": [[-r - 1.0, 0.0] for r in range(n)],
    }
    for rank, got in enumerate(start(programs.what_views_say, n)):
        for name, each in numbers.items():
            total = [sum(column) for column in zip(*each, strict=True)]
            assert got[f"{name} all_reduce"] == got[f"{name} started"] == [total] * 3
            assert got[f"{name} broadcast"] == [each[-1]] * 2
            assert got[f"{name} gathered"] == got[f"{name} exchanged"] == each
            assert got[f"{name} scattered"] == [total]
            assert got[f"{name} sendrecv"] == [each[rank - 1]]
            assert got.get(f"{name} irecv", [each[rank - 1]]) == [each[rank - 1]]


@pytest.mark.parametrize("n", [1, 3])
def test_a_mean_of_float16_is_finite_where_the_sum_is_not(start: Start, n: int) -> None:
    for got in start(programs.half_averages, n):
        assert set(got) == {40000.0}


@pytest.mark.parametrize("n", [1, 3, 4])
def test_reduce_to_each_rank(start: Start, n: int) -> None:
    for rank, got in enumerate(start(programs.reduce_with_each, n)):
        for op in programs.OPS:
            wanted = combined(op, n, 5)
            assert got[op] == [wanted if dst == rank else [] for dst in range(n)], op


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_gather_scatter_and_exchange(start: Start, n: int) -> None:
    total = n * (n + 1) / 2
    for rank, got in enumerate(start(programs.gather_scatter_exchange, n)):
        mine = [float(3 * rank + i) for i in range(3)]
        assert got["gathered"] == [1.0 + r for r in range(n) for _ in range(2)]
        assert got["summed"] == [total * x for x in mine]
        assert got["averaged"] == pytest.approx([total * x / n for x in mine])
        # the input of a reduce_scatter belongs to its caller
        assert got["input"] == [float(i * (rank + 1)) for i in range(3 * n)]
        assert got["exchanged"] == [10.0 * r + rank for r in range(n) for _ in "ab"]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_several_reductions_at_once(start: Start, n: int) -> None:
    total = n * (n + 1) / 2
    assert start(programs.several_at_once, n) == [[total * i for i in range(5)]] * n


# ── groups ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_disjoint_groups(start: Start, n: int) -> None:
    for rank, got in enumerate(start(programs.evens_and_odds, n)):
        mine = range(rank % 2, n, 2)
        assert got["is_none"] == [g != rank % 2 for g in range(min(2, n))]
        assert got["place"] == [rank // 2, len(mine)]
        assert got["total"] == sum(mine)


@pytest.mark.parametrize("n", [1, 4])
def test_a_group_numbers_its_ranks_as_listed(start: Start, n: int) -> None:
    assert start(programs.in_the_given_order, n) == [
        [n - 1 - rank, n - 1.0] for rank in range(n)
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_group_of_one(start: Start, n: int) -> None:
    assert start(programs.alone_in_a_group, n) == [[0, 1, float(r)] for r in range(n)]


@pytest.mark.parametrize("n", [3, 4])
def test_a_group_of_a_group(start: Start, n: int) -> None:
    got = start(programs.group_of_a_group, n)
    assert got[:2] == [["outer"], ["inner"]]
    total = float(sum(range(2, n)))
    assert got[2:] == [[rank, n - 2, total] for rank in range(n - 2)]


@pytest.mark.parametrize("n", [2, 4, 7])
def test_groups_that_overlap(start: Start, n: int) -> None:
    expected = [
        float(sum(a + a + 1 for a in (rank - 1, rank) if 0 <= a < n - 1))
        for rank in range(n)
    ]
    assert start(programs.groups_that_overlap, n) == expected


@pytest.mark.parametrize("n", [2, 4])
def test_any_source_in_a_group_is_the_groups_number(start: Start, n: int) -> None:
    got = start(programs.messages_in_a_group, n)
    assert got[n - 1] == [[place, n - 1.0 - place] for place in range(1, n)]


def test_a_group_and_the_world_are_different_channels(start: Start) -> None:
    assert start(programs.group_and_world_do_not_mix, 2)[1] == [2.0, 1.0]


@pytest.mark.parametrize("n", [2, 4])
def test_a_group_lives_until_all_have_used_it(start: Start, n: int) -> None:
    assert start(programs.group_outlives_its_name, n) == [0.0] + [3.0] * (n - 1)


# ── lost peers, hangs and time ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("how", "peer"),
    [
        ("recv", 1),
        ("any", None),
        ("irecv", 1),
        ("send", 1),
        ("isend", 1),
        ("sendrecv", 1),
        ("barrier", None),
        ("all_reduce", None),
    ],
)
def test_a_wait_that_runs_out_is_a_lost_peer(
    start: Start, how: str, peer: int | None
) -> None:
    told = start(programs.nobody_sends, 2, how)[0]
    assert (told["rank"], told["peer"]) == (0, peer)
    assert told["step"] >= 1
    assert 0.14 <= told["waited_s"] < 10
    assert named(told["text"], "rank 0", "rank 1") == (peer == 1)


def test_no_time_at_all_is_not_for_ever(start: Start) -> None:
    told = start(programs.nobody_sends, 2, "soon")[0]
    assert (told["rank"], told["peer"]) == (0, 1)


@pytest.mark.parametrize(
    ("how", "peer", "n"),
    [
        ("recv", 1, 2),
        ("send", 1, 2),
        ("irecv", 1, 2),
        ("barrier", None, 2),
        ("barrier", None, 3),
        ("all_reduce", None, 2),
        ("all_reduce", None, 3),
    ],
)
@pytest.mark.parametrize(
    "transport",
    [transport for transport in PROCESSES if transport.name != "nccl"],
    ids=lambda transport: transport.name,
)
def test_a_peer_that_dies_is_a_lost_peer(
    cluster: Cluster, transport: Transport, n: int, how: str, peer: int | None
) -> None:
    told: list[dict[str, Any]] = []
    run = transport.run(
        cluster,
        programs.a_peer_dies,
        n,
        how,
        on_report=lambda rank, value: told.append({"by": rank, **value}),
    )
    assert run.outcome == "died"
    assert [record.status for record in run.ranks][1] == "died"
    assert [(one["by"], one["rank"], one["peer"]) for one in told] == [(0, 0, peer)] * 2
    assert all(math.isfinite(one["waited_s"]) for one in told)


def test_abort_wakes_who_waits(cluster: Cluster, transport: Transport) -> None:
    told: dict[int, dict[str, Any]] = {}
    run = transport.run(
        cluster, programs.rank_zero_aborts, 2, on_report=told.__setitem__
    )
    run.require_finished()
    assert told[0] == {"rank": 0, "peer": 1}
    assert (told[1]["rank"], told[1]["peer"]) == (1, 0)


@pytest.mark.parametrize("size", [1, 8, 100_000])
def test_send_is_synchronous_at_every_size(
    cluster: Cluster, transport: Transport, size: int
) -> None:
    run = transport.run(cluster, programs.both_send_first, 2, size)
    assert (run.outcome, run.cycle) == ("deadlock", (0, 1))
    assert {record.status for record in run.ranks} == {"waiting"}


@pytest.mark.parametrize("n", [1, 2])
def test_time_never_goes_back(start: Start, n: int) -> None:
    for readings in start(programs.clock, n):
        assert readings == sorted(readings)
        assert len(readings) == 201
