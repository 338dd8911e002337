"""A fabric's shared links: flows that take turns, worked out by hand."""

from __future__ import annotations

from itertools import pairwise, permutations
from random import Random
from typing import Any

import pytest
import torch

from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Network, run
from distlab.sim.net.fabric import Fabric, Link
from distlab.sim.net.links import Metered
from distlab.sim.plans.closed_forms import hierarchical_s
from distlab.sim.plans.schedules import hierarchical_all_reduce, ring_all_reduce

US = 1_000_000
"""Picoseconds in a microsecond."""


def simulated_s(net: Network, world_size: int, program: Any, *args: Any) -> float:
    done = run(program, world_size, *args, net=net, journal=False)
    done.require_finished()
    return done.time_s


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


def ring(ctx: RankContext, count: int, order: tuple[int, ...] = ()) -> float:
    tensor = torch.ones(count, dtype=torch.float64)
    ring_all_reduce(ctx.comm, tensor, order)
    return float(tensor.sum())


# ── one message after the other ─────────────────────────────────────────────────────

# Two ranks to a node, one card: 1 byte/µs inside, 1 byte/µs on the card. No latency,
# so that every figure below is one of bytes.
SMALL = {"node_size": 2, "intra_node_alpha_s": 0.0, "nic_alpha_s": 0.0}
SPEEDS = {"intra_node_bytes_per_s": 1e6, "nic_bytes_per_s": 1e6}


def small(**facts: Any) -> Fabric:
    return Fabric(**{**SMALL, **SPEEDS, **facts})


def test_a_node_has_its_own_latency_and_speed() -> None:
    fabric = Fabric(
        node_size=2,
        intra_node_alpha_s=1e-6,
        intra_node_bytes_per_s=4e6,
        nic_alpha_s=5e-6,
        nic_bytes_per_s=1e6,
    )
    wires = fabric.wires(4)
    assert wires.message(0, 1, 8, 0) == (0, 3 * US)
    assert wires.message(1, 2, 8, 0) == (0, 13 * US)


def test_two_flows_through_one_card_take_turns() -> None:
    wires = small().wires(6)
    assert wires.message(0, 2, 10, 0) == (0, 10 * US)
    assert wires.message(1, 4, 10, 0) == (10 * US, 20 * US)
    assert small(nics=2).wires(6).message(1, 4, 10, 0) == (0, 10 * US)


def test_a_way_in_is_shared_like_a_way_out() -> None:
    wires = small().wires(6)
    assert wires.message(0, 4, 10, 0)[1] == 10 * US
    assert wires.message(2, 5, 10, 0)[1] == 20 * US
    inside = small(node_size=3).wires(3)
    assert inside.message(0, 2, 10, 0)[1] == 10 * US
    assert inside.message(1, 2, 10, 0)[1] == 20 * US


def test_the_slowest_link_on_the_way_decides() -> None:
    assert small(oversub=4).wires(4).message(0, 2, 10, 0) == (0, 40 * US)


def test_one_leaf_needs_no_spine() -> None:
    fabric = small(oversub=4, nodes_per_leaf=2)
    assert fabric.wires(8).message(0, 2, 10, 0) == (0, 10 * US)
    # Two cards send up through what carries half of one.
    assert (fabric.cables, fabric.cable_bytes_per_s) == (1, 0.5e6)
    assert fabric.wires(8).message(0, 4, 10, 0) == (0, 20 * US)


def test_flows_up_one_leaf_take_turns_though_their_cards_are_free() -> None:
    wires = small(oversub=4, nics=2).wires(6)
    assert wires.message(0, 2, 10, 0) == (0, 20 * US)
    assert wires.message(1, 4, 10, 0) == (0, 40 * US)


def test_a_leaf_has_cables_for_its_cards() -> None:
    wires = small(nics=2).wires(8)
    assert wires.message(0, 2, 10, 0) == wires.message(1, 4, 10, 0) == (0, 10 * US)
    wider = small(nics=3, oversub=2)  # one and a half: one, and faster
    assert (wider.cables, wider.cable_bytes_per_s) == (1, 1.5e6)
    assert wider.wires(8).message(0, 2, 15, 0) == (0, 15 * US)


def test_a_message_takes_the_cable_that_is_free_first() -> None:
    wires = small(node_size=4, nics=4, oversub=2).wires(16)
    assert wires.message(0, 4, 10, 0) == (0, 10 * US)
    assert wires.message(1, 8, 4, 0) == (0, 4 * US)
    assert wires.message(2, 12, 1, 0) == (0, 5 * US)


def test_the_ranks_of_each_node_share_its_cards_alike() -> None:
    fabric = small(node_size=3, nics=2)
    cards = [fabric.path(rank, (rank + 3) % 9)[0].names[0] for rank in range(6)]
    assert cards == [
        *("node0.nic0.out", "node0.nic1.out", "node0.nic0.out"),
        *("node1.nic0.out", "node1.nic1.out", "node1.nic0.out"),
    ]


def test_a_pause_that_fits_is_used() -> None:
    link = Link("a", 1e6)
    assert link.book(50, 10, now_ps=0) == 50
    assert link.book(0, 30, now_ps=0) == 0
    assert link.book(0, 30, now_ps=0) == 60  # 20 are left, too few
    assert link.book(0, 20, now_ps=0) == 30
    assert link.book(0, 5, now_ps=0) == 90
    assert link.pauses == []
    assert link.busy_ps == 95


def test_a_pause_that_is_over_is_not_used() -> None:
    link = Link("a", 1e6)
    link.book(50, 10, now_ps=0)
    assert link.book(70, 10, now_ps=70) == 70
    assert link.pauses == []


@pytest.mark.parametrize("n", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("facts", [{}, {"nics": 2}, {"nodes_per_leaf": 2}])
def test_all_links_have_names(n: int, facts: dict[str, Any]) -> None:
    fabric = small(node_size=3, oversub=2, **facts)
    paths = [fabric.path(*pair) for pair in permutations(range(n), 2)]
    hops = {hop for path in paths for hop in path}
    assert fabric.links(n) == {name: v for names, v in hops for name in names}


def test_usage_counts_what_each_link_carried() -> None:
    wires = small(oversub=4).wires(6)
    for dst in (2, 4):
        wires.message(0, dst, 10, 0)
    assert isinstance(wires, Metered)
    assert wires.usage() == {
        "node0.nic0.out": 20 * US,
        "node1.nic0.in": 10 * US,
        "node2.nic0.in": 10 * US,
        "leaf0.up0": 80 * US,
        "leaf1.down0": 40 * US,
        "leaf2.down0": 40 * US,
    }


def test_a_collective_on_a_fabric_takes_the_slowest_hop() -> None:
    wires = small(oversub=4).wires(8)
    inside, across = (0, 1), (0, 2)
    assert wires.collective("all_reduce", 2, 20, inside) == 20 * US
    assert wires.collective("all_reduce", 2, 20, across) == 80 * US
    # 0 → 2 and 1 → 3 are in each other's way, and so are 2 → 1 and 3 → 0.
    assert wires.collective("all_gather", 4, 10, (0, 2, 1, 3)) == 3 * 80 * US


@pytest.mark.parametrize("seed", range(40))
def test_no_cable_carries_two_messages_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    fabric = small(
        node_size=random.randint(1, 4),
        nics=random.randint(1, 3),
        nodes_per_leaf=random.randint(1, 3),
        oversub=random.choice([1, 1.5, 2, 4]),
        intra_node_bytes_per_s=random.choice([1e6, 7e6]),
    )
    booked: dict[str, list[tuple[int, int]]] = {}

    class Watched(Link):
        def book(self, from_ps: int, took_ps: int, now_ps: int) -> int:
            begin = super().book(from_ps, took_ps, now_ps)
            assert begin >= from_ps
            booked.setdefault(self.name, []).append((begin, begin + took_ps))
            return begin

    alone = fabric.wires(12)  # for one message at a time, long after the last one
    for src, dst in permutations(range(12), 2):
        alone.message(src, dst, 0, 0)  # so that all its links are there, and unwatched
    monkeypatch.setattr("distlab.sim.net.fabric.Link", Watched)
    wires, now = fabric.wires(12), 0
    for number in range(1, 41):
        src, dst = random.sample(range(12), 2)
        size, later = random.randint(0, 20), number * 10**12
        now += random.choice([0, 0, 1, 30]) * US
        start, end = wires.message(src, dst, size, now)
        took = alone.message(src, dst, size, later)[1] - later
        assert now <= start <= end
        assert end - now >= took
    assert any(start > 0 for spans in booked.values() for start, _ in spans)
    for spans in booked.values():
        taken = sorted(span for span in spans if span[0] < span[1])
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    busy = {n: sum(end - start for start, end in s) for n, s in sorted(booked.items())}
    assert isinstance(wires, Metered)
    assert wires.usage() == {name: ps for name, ps in busy.items() if ps}


# ── whole schedules ─────────────────────────────────────────────────────────────────

N, NODE_SIZE, COUNT = 16, 4, 16 * 50  # 50 float64 to a chunk
CHUNK_S = 400 / 1e6  # one chunk through one card
ALPHA_S = 100e-6
IN_ORDER = tuple(range(N))
INTERLEAVED = tuple(range(0, N, 2)) + tuple(range(1, N, 2))


def big(**facts: Any) -> Fabric:
    return small(**{"node_size": NODE_SIZE, "intra_node_bytes_per_s": 1e8, **facts})


@pytest.mark.parametrize(("oversub", "slower"), [(1, 1), (2, 2), (4, 4)])
def test_a_ring_on_an_oversubscribed_fabric(oversub: int, slower: int) -> None:
    # In node order one flow leaves each node; nobody is faster than the slowest
    # hop, and each of the 2 (n - 1) steps goes through it. The uplink of a node has
    # 1 / oversub of its card's speed.
    net = big(nic_alpha_s=ALPHA_S, oversub=oversub)
    expected_s = 2 * (N - 1) * (ALPHA_S + slower * CHUNK_S)
    assert simulated_s(net, N, ring, COUNT) == close_to(expected_s)


def test_oversubscription_4_costs_a_factor_of_4_without_latency() -> None:
    once, four = (
        simulated_s(big(oversub=oversub), N, ring, COUNT) for oversub in (1, 4)
    )
    assert four / once == close_to(4.0)


def test_where_the_ranks_are_matters() -> None:
    # Two nodes of two; 0 → 2 → 1 → 3 → 0 goes across at every step, so two flows
    # share each card all the time. Without latency the cards never rest.
    in_order = simulated_s(small(), 4, ring, 4 * 50, (0, 1, 2, 3))
    crossed = simulated_s(small(), 4, ring, 4 * 50, (0, 2, 1, 3))
    assert in_order == close_to(6 * CHUNK_S)
    assert crossed == close_to(2 * 6 * CHUNK_S)


def test_an_interleaved_ring_pays_for_every_flow_that_leaves_a_node() -> None:
    # Nodes of 4 ranks, the ring in steps of two: of 4 ranks, 2 send to another
    # node, so 2 flows share the card. Its bytes are a floor; a ceiling is that
    # everybody waits for all in every step.
    net = big(nic_alpha_s=ALPHA_S)
    took_s = simulated_s(net, N, ring, COUNT, INTERLEAVED)
    floor_s = 2 * (N - 1) * 2 * CHUNK_S
    assert floor_s < took_s <= 2 * (N - 1) * (ALPHA_S + 2 * CHUNK_S) * (1 + 1e-9)
    assert took_s > 1.5 * simulated_s(net, N, ring, COUNT, IN_ORDER)


@pytest.mark.parametrize("oversub", [1, 4])
def test_the_estimate_of_a_collective_is_that_ring(oversub: int) -> None:
    net = big(nic_alpha_s=ALPHA_S, oversub=oversub)
    estimated_ps = net.wires(N).collective("all_reduce", N, 8 * COUNT, IN_ORDER)
    assert estimated_ps * 1e-12 == close_to(simulated_s(net, N, ring, COUNT))


def hierarchical(ctx: RankContext, count: int, node_size: int) -> None:
    hierarchical_all_reduce(ctx.comm, torch.ones(count).double(), node_size)


@pytest.mark.parametrize("oversub", [1, 4])
def test_the_hierarchical_formula_on_a_fabric(oversub: int) -> None:
    net = big(
        nics=NODE_SIZE, intra_node_alpha_s=3e-6, nic_alpha_s=ALPHA_S, oversub=oversub
    )
    inside = AlphaBeta(alpha_s=3e-6, bytes_per_s=1e8)
    took_s = simulated_s(net, N, hierarchical, COUNT, NODE_SIZE)
    if oversub == 1:  # each rank has a card for itself, and the uplinks are wide enough
        between = AlphaBeta(alpha_s=ALPHA_S, bytes_per_s=1e6)
        assert took_s == close_to(
            hierarchical_s(N // NODE_SIZE, NODE_SIZE, 8 * COUNT, inside, between)
        )
        return
    # Four flows take turns on an uplink as fast as one card: each has a quarter of it,
    # of which at most the latencies of the others are saved.
    between = AlphaBeta(alpha_s=ALPHA_S, bytes_per_s=0.25e6)
    ceiling_s = hierarchical_s(N // NODE_SIZE, NODE_SIZE, 8 * COUNT, inside, between)
    assert 0.8 * ceiling_s < took_s <= ceiling_s * (1 + 1e-9)


def test_a_hierarchical_all_reduce_beats_a_ring_where_cards_are_shared() -> None:
    # Big enough for the bytes to count: the ring sends 2 (n - 1) / n of the tensor
    # through each card, four shares over four ranks send 2 (p - 1) / p.
    net = big(nic_alpha_s=ALPHA_S)
    ring_s, two_levels_s = (
        simulated_s(net, N, ring, COUNT),
        simulated_s(net, N, hierarchical, COUNT, NODE_SIZE),
    )
    assert two_levels_s < ring_s


def test_a_run_on_a_fabric_is_the_same_twice() -> None:
    first, second = (
        run(ring, N, COUNT, INTERLEAVED, net=big(oversub=3), journal=False)
        for _ in range(2)
    )
    assert first.trace == second.trace
    assert len(first.trace) == 2 * (N - 1) * N
    assert first.values == [float(COUNT * N)] * N
