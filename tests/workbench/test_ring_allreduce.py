"""The ring beside torch's all_reduce and tensor_split, on real and simulated ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.cli.sim import sim
from distlab.comm import Comm
from distlab.curriculum.units import load
from distlab.grading.checks.ring_allreduce.clock import (
    RECEIVED,
    Played,
    adds_without,
    misuses,
)
from distlab.grading.checks.ring_allreduce.watched import (
    FILLED,
    READ_EARLY,
    SENT_CHANGED,
    TWICE,
    WRITTEN,
    WatchedComm,
)
from distlab.runner import Cluster, RankContext
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.plans import closed_forms as forms
from distlab.simulated.results import judged
from tests.workbench.judging import catalogue, solution_of, verdict_on, with_body

NET = AlphaBeta(alpha_s=1e-5, bytes_per_s=1e9)
LENGTHS = (0, 1, 2, 13, 24, 1000)


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("ring_allreduce", "reference")


def simulated(program: Any, n: int) -> SimRun:
    done = run(program, n, net=NET, journal=False)
    done.require_finished()
    return done


# ── the chunks and segments ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 3, 4, 32])
def test_the_chunks_are_as_even_as_those_of_torch(unit: ModuleType, n: int) -> None:
    for length in LENGTHS:
        sizes = [end - start for start, end in unit.chunk_bounds(length, n)]
        beside = [len(part) for part in torch.arange(length).tensor_split(n)]
        assert sorted(sizes) == sorted(beside)


@pytest.mark.parametrize("segment_bytes", [1, 8, 12, 40, 1 << 20])
def test_no_segment_is_too_long_and_all_chunks_have_equally_many(
    unit: ModuleType, segment_bytes: int
) -> None:
    for length in LENGTHS:
        tensor = torch.arange(length, dtype=torch.float64)
        segments = unit.split_segments(tensor, 3, segment_bytes)
        assert len(segments) % 3 == 0
        assert torch.equal(torch.cat(segments), tensor)
        assert max(segment.nbytes for segment in segments) <= max(segment_bytes, 8)


# ── real ranks, torch's own beside ──────────────────────────────────────────────────


def both(context: RankContext, dtype: str) -> list[bool]:
    """For each way and length: whether it is what torch's all_reduce makes of it."""
    unit, comm = load("ring_allreduce", "reference"), context.comm
    same = []
    for length in LENGTHS:
        own = torch.arange(length) % 11 + 3 * comm.rank
        own = own.to(getattr(torch, dtype))
        right = own.clone()
        comm.all_reduce(right)
        for way in (
            unit.all_reduce,
            unit.pipelined_all_reduce,
            lambda c, t: unit.pipelined_all_reduce(c, t, 64),
        ):
            tensor = own.clone()
            way(comm, tensor)
            same.append(torch.equal(tensor, right))
        grid = own.repeat(2).view(2, length).t()  # with strides
        unit.all_reduce(comm, grid)
        same += [torch.equal(column, right) for column in grid.unbind(1)]
    return same


@pytest.mark.parametrize(
    ("n", "dtype"), [(2, "float32"), (3, "bfloat16"), (4, "int64")]
)
def test_on_gloo_it_is_what_torch_makes_of_it(
    cluster: Cluster, n: int, dtype: str
) -> None:
    done = cluster.run(both, n, dtype)
    assert done.outcome == "finished", done.explanation
    assert all(all(value) for value in done.values)


# ── the plan ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("num_segments", [1, 2, 5])
def test_the_plans_add_up_and_leave_buffers_in_flight_alone(
    unit: ModuleType, n: int, num_segments: int
) -> None:
    plans = [list(unit.segment_plan(rank, n, num_segments)) for rank in range(n)]
    played = Played(plans, n * num_segments)
    assert played.stuck() == []
    assert played.crossed is None
    for rank, plan in enumerate(plans):
        assert set(played.segments(rank)) == {(1,) * n}
        assert list(misuses(plan)) == []
        assert sum(op.kind == "isend" for op in plan) == 2 * (n - 1) * num_segments


def test_a_plan_is_played_by_the_clock_of_the_guide(unit: ModuleType) -> None:
    plans = [list(unit.segment_plan(rank, 3, 8)) for rank in range(3)]
    played = Played(plans, 24, 1.0, 0.75)
    assert played.time_s == 32.0
    assert [played.idle_adds(rank) for rank in range(3)] == [(0, 0)] * 3
    assert all(adds_without(RECEIVED, plan) <= 1 for plan in plans)
    body = catalogue()["SP15"].body
    scope: dict[str, Any] = {"Op": unit.Op}
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    exec(f"def plan(rank, world_size, num_segments):\n{lines}", scope)
    plans = [scope["plan"](rank, 3, 8) for rank in range(3)]
    played = Played(plans, 24, 1.0, 0.75)
    assert played.time_s == 44.0
    assert [played.idle_adds(rank) for rank in range(3)] == [(16, 16)] * 3
    assert all(adds_without(RECEIVED, plan) == 16 for plan in plans)


def test_the_drawing_of_the_guide_is_that_of_the_plan(unit: ModuleType) -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "phase3_multi_node/guide/ring_allreduce.md").read_text("utf-8")
    for line in unit.draw(unit.segment_plan(0, 2, 1)).splitlines():
        assert f"\n{line}" in page


def test_the_executor_is_judged_with_the_reference_s_plan_if_there_is_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = with_body(
        solution_of("ring_allreduce"),
        "ring_allreduce.segment_plan",
        'raise NotImplementedError("ring_allreduce.segment_plan")',
    )
    verdict = verdict_on(
        cluster, tmp_path, "ring_allreduce.segments", text, worlds=(3,)
    )
    assert verdict.status == "pass"


# ── whose mistake it is ─────────────────────────────────────────────────────────────

OWN_CUTS = """
n, rank = comm.world_size, comm.rank
chunks = tensor.tensor_split(n)
for step in range(n - 1):
    recv_buffer = torch.empty_like(chunks[(rank - step - 2) % n])
    outgoing = chunks[(rank - step - 1) % n]
    comm.sendrecv(outgoing, (rank + 1) % n, recv_buffer, (rank - 1) % n)
    chunks[(rank - step - 2) % n].add_(recv_buffer)
return rank
"""


@pytest.mark.parametrize("name", ["RA07", "RA08"])
def test_a_ring_that_does_not_use_wrong_bounds_is_not_judged_by_them(
    name: str, cluster: Cluster, tmp_path: Path
) -> None:
    text = with_body(
        solution_of("ring_allreduce"), "ring_allreduce.reduce_scatter", OWN_CUTS
    )
    text = catalogue()[name].applied_to(text)
    verdict = verdict_on(
        cluster, tmp_path, "ring_allreduce.reduce_scatter", text, worlds=(4,)
    )
    assert verdict.status == "fail"
    assert "chunk_bounds" in verdict.message
    assert "3.1" in verdict.message


# ── simulated ranks: the formula ────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 8, 64])
def test_a_ring_takes_what_its_formula_says(unit: ModuleType, n: int) -> None:
    def program(context: RankContext) -> Tensor:
        tensor = torch.ones(n * 50)
        unit.all_reduce(context.comm, tensor)
        return tensor

    done = simulated(program, n)
    assert all(bool((value == n).all()) for value in done.values)
    formula_s = forms.ring_all_reduce_s(n, n * 200, NET)
    assert done.time_s == pytest.approx(formula_s, rel=1e-9)


def test_two_ranks_with_little_to_send_need_one_step(unit: ModuleType) -> None:
    def program(context: RankContext) -> None:
        unit.pipelined_all_reduce(context.comm, torch.ones(1024))

    assert simulated(program, 2).time_s == pytest.approx(NET.message_s(4096))


# ── what distlab sim says of a reduce_scatter in place ──────────────────────────────


@pytest.mark.parametrize(
    ("claimed", "wrong"), [((0, 1, 2), []), ((1, 2, 0), [0, 1, 2]), ((0, 0, 2), [0, 1])]
)
def test_a_chunk_is_right_if_it_is_the_one_that_is_said_and_nobody_elses(
    claimed: tuple[int, ...], wrong: list[int]
) -> None:
    right = [f"{rank}:{word}" for rank, word in enumerate(words_of_chunks())]
    words = [f"{c}:{right[r].partition(':')[2]}" for r, c in enumerate(claimed)]
    told = judged(["reduce_scatter"], [[word] for word in words], seed=0, count=12)
    assert told["wrong_ranks"] == wrong


def words_of_chunks() -> list[str]:
    results = importlib.import_module("distlab.simulated.results")
    return list(results.expected("reduce_scatter", 0, 3, 12))


@pytest.mark.slow
def test_sim_takes_every_task_that_sends(
    capsys: pytest.CaptureFixture[str], unit: ModuleType
) -> None:
    for task, num_results in (("3.2", 8), ("3.3", 1), ("3.5", 1)):  # different ones
        assert sim(task, world_size=8, size="4KiB", code="reference", as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["results"], told["wrong_ranks"]) == (num_results, [])


# ── the watched communicator ────────────────────────────────────────────────────────


def sins_of(hand: Any) -> list[list[str]]:
    """What is seen when rank 0 sends to rank 1, each with its own way of doing so."""

    def program(context: RankContext) -> list[str]:
        unit = ModuleType("unit")
        comm = WatchedComm(context.comm, unit)
        hand(comm, torch.ones(4, dtype=torch.float64))
        return [what for what, _ in comm.sins]

    return list(simulated(program, 2).values)


def test_who_waits_first_is_not_to_blame() -> None:
    def hand(comm: Comm, tensor: Tensor) -> None:
        if comm.rank == 0:
            comm.isend(tensor, 1).wait()
        else:
            comm.irecv(tensor, 0).wait()
        tensor += 1

    assert sins_of(hand) == [[], []]


def test_a_tensor_under_way_is_not_to_be_touched() -> None:
    def hand(comm: Comm, tensor: Tensor) -> None:
        if comm.rank == 0:
            work = comm.isend(tensor, 1)
            tensor += 1
        else:
            work = comm.irecv(tensor, 0)
            tensor.zero_()
        work.wait()

    assert sins_of(hand) == [[SENT_CHANGED], [WRITTEN]]


def test_nor_sent_on_before_it_came_nor_received_into_twice() -> None:
    def hand(comm: Comm, tensor: Tensor) -> None:
        other = 1 - comm.rank
        if comm.rank == 0:
            works = [comm.irecv(tensor, other)]
            works += [comm.isend(tensor[1:], other), comm.irecv(tensor[:2], other)]
        else:
            works = [comm.isend(tensor, other)]
            works += [comm.irecv(tensor[1:], other), comm.isend(tensor[:2] + 1, other)]
        for work in works:
            work.wait()

    first, second = sins_of(hand)
    assert first[:2] == [READ_EARLY, TWICE]
    assert second[0] == FILLED
