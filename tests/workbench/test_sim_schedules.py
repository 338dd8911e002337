"""Written-down schedules: right sums, and exactly the time that their formula says.

For each formula there is a schedule with one slip that the equality tells apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.runner import Cluster, RankContext, Run
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.plans import closed_forms as forms
from distlab.sim.plans import schedules as sched

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
WORLDS = (2, 3, 4, 8, 16, 64)
NODE_SIZE = 4
COUNT = 64 * 3 * 10  # float64; every world size of the tests divides it

AllReduce = Callable[[Comm, Tensor], None]


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


def simulated(program: Any, n: int, *args: Any, net: AlphaBeta = NET) -> SimRun:
    done = run(program, n, *args, net=net, journal=False)
    done.require_finished()
    return done


def reduce_ones(ctx: RankContext, name: str, count: int) -> list[float]:
    """Run the all-reduce on r, 2 r, 3 r …; what came out, in short."""
    tensor = (ctx.rank + 1) * torch.arange(1.0, count + 1, dtype=torch.float64)
    ALL_REDUCES[name](ctx.comm, tensor)
    return [float(tensor[0]), float(tensor[-1]), float(tensor.sum())]


def hierarchical(comm: Comm, tensor: Tensor) -> None:
    sched.hierarchical_all_reduce(comm, tensor, min(NODE_SIZE, comm.world_size))


def hierarchical_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    size = min(NODE_SIZE, n)
    return forms.hierarchical_s(n // size, size, num_bytes, net, net)


ALL_REDUCES: dict[str, AllReduce] = {
    "ring": sched.ring_all_reduce,
    "recursive doubling": sched.recursive_doubling_all_reduce,
    "Rabenseifner": sched.rabenseifner_all_reduce,
    "tree": sched.tree_all_reduce,
    "parameter server": sched.parameter_server,
    "hierarchical": hierarchical,
}
SECONDS = {**forms.ALL_REDUCES, "hierarchical": hierarchical_s}
POWERS_ONLY = ("recursive doubling", "Rabenseifner")


def applies(name: str, n: int) -> bool:
    return n & (n - 1) == 0 or name not in POWERS_ONLY


CASES = [(name, n) for name in ALL_REDUCES for n in WORLDS if applies(name, n)]


def sums(n: int, count: int) -> list[float]:
    ranks = n * (n + 1) / 2
    return [ranks, ranks * count, ranks * count * (count + 1) / 2]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_an_all_reduce_takes_what_its_formula_says(name: str, n: int) -> None:
    done = simulated(reduce_ones, n, name, COUNT)
    assert done.values == [sums(n, COUNT)] * n
    assert done.time_s == close_to(SECONDS[name](n, 8 * COUNT, NET))
    assert done.time_s >= forms.all_reduce_bound_s(n, 8 * COUNT, NET) * (1 - 1e-9)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_the_formula_holds_on_another_net(name: str) -> None:
    net = AlphaBeta()
    done = simulated(reduce_ones, 8, name, COUNT, net=net)
    assert done.time_s == close_to(SECONDS[name](8, 8 * COUNT, net))


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("n", [1, 4])
def test_sums_of_a_tensor_that_does_not_fall_into_equal_chunks(
    name: str, n: int
) -> None:
    for count in (1, 2, 7, 61):
        assert simulated(reduce_ones, n, name, count).values == [sums(n, count)] * n


def all_of_them(ctx: RankContext, count: int) -> list[list[float]]:
    return [reduce_ones(ctx, name, count) for name in ALL_REDUCES]


def test_the_schedules_run_on_real_ranks(cluster: Cluster) -> None:
    done: Run = cluster.run(all_of_them, 4, 61).require_finished()
    assert done.values == [[sums(4, 61)] * len(ALL_REDUCES)] * 4


# ── one slip each ───────────────────────────────────────────────────────────────────


def ring_with_a_step_too_many(comm: Comm, tensor: Tensor) -> None:
    chunks = tensor.tensor_split(comm.world_size)
    sched.ring_reduce_scatter(comm, chunks)
    sched.ring_all_gather(comm, chunks)
    n, rank = comm.world_size, comm.rank
    out, into = chunks[rank], torch.empty_like(chunks[rank - 1])
    comm.sendrecv(out, (rank + 1) % n, into, (rank - 1) % n)


def doubling_in_two_halves(comm: Comm, tensor: Tensor) -> None:
    for half in tensor.tensor_split(2):
        sched.recursive_doubling_all_reduce(comm, half)


def rabenseifner_that_gathers_around_a_ring(comm: Comm, tensor: Tensor) -> None:
    chunks = tensor.tensor_split(comm.world_size)
    box = tensor.clone()
    sched.rabenseifner_all_reduce(comm, box)
    chunks[comm.rank].copy_(box.tensor_split(comm.world_size)[comm.rank])
    sched.ring_all_gather(comm, chunks)


def tree_that_serialises(comm: Comm, tensor: Tensor) -> None:
    sched.tree_reduce(comm, tensor)
    if comm.rank:
        comm.recv(tensor, 0)
    else:
        for dst in range(1, comm.world_size):
            comm.send(tensor, dst)


def server_that_takes_one_at_a_time(comm: Comm, tensor: Tensor) -> None:
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    box = torch.empty_like(tensor)
    for src in range(1, comm.world_size):
        comm.recv(box, src)
        tensor.add_(box)
    for dst in range(1, comm.world_size):
        comm.send(tensor, dst)


def hierarchical_that_sends_everything_across(comm: Comm, tensor: Tensor) -> None:
    place = comm.rank % NODE_SIZE
    start = comm.rank - place
    sched.ring_all_reduce(comm, tensor, range(start, start + NODE_SIZE))
    sched.ring_all_reduce(comm, tensor, range(place, comm.world_size, NODE_SIZE))


SLIPS: dict[str, AllReduce] = {
    "ring": ring_with_a_step_too_many,
    "recursive doubling": doubling_in_two_halves,
    "Rabenseifner": rabenseifner_that_gathers_around_a_ring,
    "tree": tree_that_serialises,
    "parameter server": server_that_takes_one_at_a_time,
    "hierarchical": hierarchical_that_sends_everything_across,
}


def reduce_wrongly(ctx: RankContext, name: str, count: int) -> float:
    tensor = torch.ones(count, dtype=torch.float64)
    SLIPS[name](ctx.comm, tensor)
    return float(tensor.sum())


@pytest.mark.parametrize("name", SLIPS)
def test_the_equality_tells_a_slip_apart_though_the_sums_are_right(name: str) -> None:
    for n in (8, 16):
        done = simulated(reduce_wrongly, n, name, COUNT)
        assert done.values == [float(n * COUNT)] * n
        assert done.time_s != close_to(SECONDS[name](n, 8 * COUNT, NET))


# ── parts of an all-reduce ──────────────────────────────────────────────────────────


def scatter(ctx: RankContext, count: int) -> list[float]:
    chunks = torch.ones(count, dtype=torch.float64).tensor_split(ctx.world_size)
    sched.ring_reduce_scatter(ctx.comm, chunks)
    return chunks[ctx.rank].tolist()


def gather(ctx: RankContext, count: int) -> list[float]:
    chunks = torch.zeros(count, dtype=torch.float64).tensor_split(ctx.world_size)
    chunks[ctx.rank].fill_(ctx.rank)
    sched.ring_all_gather(ctx.comm, chunks)
    return [float(chunk[0]) for chunk in chunks]


@pytest.mark.parametrize("n", WORLDS)
def test_half_a_ring(n: int) -> None:
    expected_s = forms.ring_reduce_scatter_s(n, 8 * COUNT, NET)
    scattered = simulated(scatter, n, COUNT)
    assert scattered.values == [[float(n)] * (COUNT // n)] * n
    assert scattered.time_s == close_to(expected_s)
    gathered = simulated(gather, n, COUNT)
    assert gathered.values == [list(map(float, range(n)))] * n
    assert gathered.time_s == close_to(expected_s)


def down_a_tree(ctx: RankContext, src: int) -> float:
    tensor = torch.full((COUNT,), float(ctx.rank), dtype=torch.float64)
    sched.tree_broadcast(ctx.comm, tensor, src)
    return float(tensor[-1])


def up_a_tree(ctx: RankContext, dst: int) -> float:
    tensor = torch.full((COUNT,), float(ctx.rank), dtype=torch.float64)
    sched.tree_reduce(ctx.comm, tensor, dst)
    return float(tensor[-1])


@pytest.mark.parametrize("n", [*WORLDS, 1, 5, 6, 7, 9, 13])
def test_a_tree_takes_its_depth_for_any_number_of_ranks(n: int) -> None:
    expected_s = close_to(forms.tree_s(n, 8 * COUNT, NET))
    for root in {0, 1 % n, n - 1}:
        down, up = simulated(down_a_tree, n, root), simulated(up_a_tree, n, root)
        assert down.values == [float(root)] * n
        assert up.values[root] == n * (n - 1) / 2
        assert (down.time_s, up.time_s) == (expected_s, expected_s)
        assert len(down.trace) == len(up.trace) == n - 1


def around_a_ring(ctx: RankContext, order: tuple[int, ...]) -> float:
    tensor = torch.full((COUNT,), float(ctx.rank), dtype=torch.float64)
    if ctx.rank in order:
        sched.ring_all_reduce(ctx.comm, tensor, order)
    return float(tensor[7])


def test_a_ring_in_any_order_and_of_some_ranks() -> None:
    done = simulated(around_a_ring, 6, (4, 0, 5, 2))
    assert done.values == [11.0, 1.0, 11.0, 3.0, 11.0, 11.0]
    assert done.time_s == close_to(forms.ring_all_reduce_s(4, 8 * COUNT, NET))


# ── what is refused ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", POWERS_ONLY)
@pytest.mark.parametrize("n", [3, 6])
def test_what_needs_a_power_of_two_says_so(name: str, n: int) -> None:
    with pytest.raises(ValueError, match=rf"\b2, 4, 8, ….*\b{n}\b"):
        SECONDS[name](n, 8 * COUNT, NET)
    done = run(reduce_ones, n, name, COUNT, net=NET)
    assert done.outcome == "raised"
    errors = {record.error.message for record in done.ranks if record.error}
    assert len(errors) == 1
    assert re.search(rf"\b2, 4, 8, ….*\b{n}\b", errors.pop())


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        (lambda: forms.ring_all_reduce_s(3, 100, NET), r"^100 bytes.*\b3\b"),
        (lambda: forms.rabenseifner_s(8, 100, NET), r"^100 bytes.*\b8\b"),
        (lambda: hierarchical_s(8, 100, NET), r"^100 bytes.*\b8\b"),
        (lambda: forms.ring_all_reduce_s(0, 100, NET), "^0 ranks"),
        (lambda: forms.tree_s(-1, 100, NET), "^-1 ranks"),
        (lambda: forms.parameter_server_s(0, 1, NET), "^0 ranks"),
        (lambda: forms.latency_bound_s(0, NET), "^0 ranks"),
        (lambda: forms.bandwidth_bound_s(0, 1, NET), "^0 ranks"),
    ],
)
def test_formulas_refuse_what_they_do_not_hold_for(
    formula: Callable[[], float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        formula()


def in_nodes(ctx: RankContext, size: int) -> None:
    sched.hierarchical_all_reduce(ctx.comm, torch.zeros(8), size)


@pytest.mark.parametrize("size", [0, 4])
def test_ranks_that_do_not_fill_nodes(size: int) -> None:
    error = run(in_nodes, 6, size, net=NET).ranks[0].error
    assert error is not None
    assert re.search(rf"\b6 ranks\b.* {size}\b", error.message)


def test_no_all_reduce_beats_the_bounds_and_two_reach_them() -> None:
    free = AlphaBeta(alpha_s=0.0, bytes_per_s=2e9)
    no_bytes = AlphaBeta(alpha_s=3e-6, bytes_per_s=math.inf)
    num_bytes = 8 * COUNT
    for n in WORLDS:
        ring_s = forms.ring_all_reduce_s(n, num_bytes, free)
        assert ring_s == close_to(forms.all_reduce_bound_s(n, num_bytes, free))
    for n in (2, 4, 8, 16, 64):
        doubling_s = forms.recursive_doubling_s(n, num_bytes, no_bytes)
        assert doubling_s == close_to(forms.all_reduce_bound_s(n, num_bytes, no_bytes))
