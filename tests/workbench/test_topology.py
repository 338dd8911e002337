"""All-reduces on nodes: in virtual time at full size, and on gloo's own groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.comm import CommRefusedError
from distlab.curriculum.units import load
from distlab.grading.checks.topology.choose import ON_NODES, SIZES, SLOWER
from distlab.grading.checks.topology.estimate import PLAYED
from distlab.grading.checks.topology.forms import NAMES, NodesModel, flat_s
from distlab.grading.checks.topology.nodes import levels_on
from distlab.runner import Cluster, RankContext
from distlab.sim import AlphaBeta, Fabric, SimRun, Sized, run
from distlab.sim.net.links import PS
from distlab.sim.plans import closed_forms as forms
from distlab.sim.plans import schedules
from distlab.sim.plans.members import Members

LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
NICS = {  # per node, and the oversubscription of the uplinks
    "one NIC per rank": (8, 1.0),
    "one NIC per node": (1, 1.0),
    "NICs 4:1 oversubscribed": (8, 4.0),
    "one slow NIC": (1, 1.0),
    "links inside a node no faster": (1, 1.0),
    "a NIC wider than its ranks' links": (4, 1.0),  # one for each rank: no more
}


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("topology", "reference")


def simulated(program: Callable[..., Any], n: int, *args: Any, **how: Any) -> SimRun:
    def all_of_it(context: RankContext) -> Any:  # a module cannot be copied
        return program(context, *args)

    done = run(all_of_it, n, journal=False, **how)
    done.require_finished()
    return done


# ── 3.6: the figures that the guidelines quote ──────────────────────────────────────


def test_predictions_of_the_guidelines(unit: ModuleType) -> None:
    link = unit.Link(LINK.alpha_s, LINK.bytes_per_s)
    few, many = (
        unit.estimate_time(8, 10**9, link),
        unit.estimate_time(1024, 10**9, link),
    )
    small, tiny = (
        unit.estimate_time(8, 4096, link),
        unit.estimate_time(1024, 4096, link),
    )
    assert [round(1e3 * few[name]) for name in NAMES[:3]] == [1120, 140, 240]
    assert [round(1e3 * many[name]) for name in NAMES[1:3]] == [180, 800]
    assert [round(1e3 * small[name], 3) for name in NAMES[:2]] == [0.145, 0.141]
    assert [round(1e3 * tiny[name], 2) for name in NAMES[1:3]] == [20.46, 0.1]


@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("num_bytes", [64 * 24, 64 * 100_000])
def test_predictions_are_what_simulated_ranks_take(
    unit: ModuleType, n: int, num_bytes: int
) -> None:
    told = unit.estimate_time(n, num_bytes, unit.Link(LINK.alpha_s, LINK.bytes_per_s))
    for name, program in PLAYED.items():
        took_s = simulated(program, n, num_bytes, net=LINK).time_s
        assert math.isclose(told[name], took_s, rel_tol=1e-6)
        assert math.isclose(told[name], flat_s(n, num_bytes, LINK)[name], rel_tol=1e-9)


# ── 3.7: on many ranks, and on real groups ──────────────────────────────────────────


def hierarchical(
    context: RankContext, unit: ModuleType, k: int, count: int, doubling: bool
) -> tuple[Tensor, Tensor]:
    n = context.world_size
    nodes = [range(start, start + k) for start in range(0, n, k)]
    inter_node = unit.recursive_doubling if doubling else schedules.ring_all_reduce
    generator = torch.Generator().manual_seed(context.rank)
    before = torch.randn(count, generator=generator)
    tensor = before.clone()
    unit.hierarchical(levels_on(context.comm, unit, nodes), tensor, inter_node)
    return before, tensor


def fabric(nodes: NodesModel) -> Fabric:
    nics, oversub = NICS[nodes.name]
    return Fabric(
        node_size=nodes.k,
        intra_node_alpha_s=nodes.intra_node.alpha_s,
        intra_node_bytes_per_s=nodes.intra_node.bytes_per_s,
        nics=nics,
        nic_bytes_per_s=nodes.inter_node.bytes_per_s,
        nic_alpha_s=nodes.inter_node.alpha_s,
        oversub=oversub,
    )


@pytest.mark.parametrize("n", [8, 64, 1024])
def test_hierarchical_takes_what_its_formula_says(unit: ModuleType, n: int) -> None:
    k, net = 8, Fabric(node_size=8, nics=8)
    intra_node = AlphaBeta(alpha_s=3e-6, bytes_per_s=450e9)
    inter_node = AlphaBeta(alpha_s=10e-6, bytes_per_s=50e9)
    doubling = n == 1024  # a ring of 128 nodes is for the benchmarks
    done = simulated(hierarchical, n, unit, k, 4 * n, doubling, net=net)
    if doubling:
        formula_s = 2 * (k - 1) * intra_node.message_s(16 * n / k)
        formula_s += math.log2(n // k) * inter_node.message_s(16 * n / k)
    else:
        formula_s = forms.hierarchical_s(n // k, k, 16 * n, intra_node, inter_node)
    assert done.time_s == pytest.approx(formula_s, rel=1e-6)
    total = torch.stack([before for before, _ in done.values]).double().sum(0)
    first = done.values[0][1]
    torch.testing.assert_close(first.double(), total, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(after, first) for _, after in done.values)


def test_hierarchical_relieves_the_hot_uplink(unit: ModuleType) -> None:
    """By the byte, on each link of the simulated switches."""
    n, k, count = 64, 8, 64 * 64
    net = Fabric(node_size=k, nics=1, oversub=1.0)
    usage = {}
    for name, program, args in (
        ("hierarchical", hierarchical, (unit, k, count, False)),
        ("flat", _doubling, (count,)),
    ):
        links = simulated(program, n, *args, net=net).links
        usage[name] = max(ps / PS for link, ps in links.items() if ".up" in link)
    p, num_bytes = n // k, 4 * count
    seconds = 2 * (p - 1) / p * num_bytes / net.nic_bytes_per_s
    assert usage["hierarchical"] == pytest.approx(seconds, rel=1e-4)
    assert usage["flat"] == pytest.approx(k * 3 * num_bytes / 50e9, rel=1e-4)


def _doubling(context: RankContext, count: int) -> None:
    schedules.recursive_doubling_all_reduce(context.comm, torch.ones(count))


def on_real_groups(context: RankContext) -> list[Tensor]:
    """Nodes of unlike sizes on new_group's groups, summed by the library."""
    unit = load("topology", "reference")
    comm = context.comm
    found = []
    for nodes in ([[0, 1, 2], [3]], [[0, 2], [3, 1]], [[0, 1, 2, 3]]):
        levels = unit.make_levels(comm, nodes)
        tensor = torch.arange(7.0, dtype=torch.float64) * (comm.rank + 1)
        unit.hierarchical(levels, tensor, lambda group, part: group.all_reduce(part))
        found.append(tensor)
    return found


def test_on_groups_of_gloo_with_its_all_reduce(cluster: Cluster) -> None:
    run = cluster.run(on_real_groups, 4)
    assert run.outcome == "finished"
    expected = torch.arange(7.0, dtype=torch.float64) * 10
    for tensors in run.values:
        assert all(torch.equal(tensor, expected) for tensor in tensors)


# ── 3.8: played, not only worked out ────────────────────────────────────────────────


def _levels(context: RankContext, num_bytes: int, k: int) -> None:
    box: Any = Sized(num_bytes)
    schedules.hierarchical_all_reduce(context.comm, box, k)


def played_s(nodes: NodesModel, num_bytes: int) -> dict[str, float]:
    """All four in virtual time, on the nodes' network."""
    n, net = nodes.n, fabric(nodes)
    found = {
        name: simulated(program, n, num_bytes, net=net, trace=False).time_s
        for name, program in PLAYED.items()
    }
    last = simulated(_levels, n, num_bytes, nodes.k, net=net, trace=False)
    return {**found, "hierarchical": last.time_s}


PLAYED_TOO = [nodes for nodes in ON_NODES if nodes.n <= 64]


@pytest.mark.parametrize("nodes", PLAYED_TOO, ids=lambda i: i.setting)
def test_the_choice_is_the_best_in_virtual_time(
    unit: ModuleType, nodes: NodesModel
) -> None:
    links = [unit.Link(x.alpha_s, x.bytes_per_s) for x in (nodes.intra_node,)]
    links += [unit.Link(nodes.inter_node.alpha_s, nodes.inter_node.bytes_per_s)]
    cluster = unit.Cluster(nodes.n, nodes.k, *links, nodes.uplink_bytes_per_s)
    for num_bytes in SIZES[1 :: 4 if nodes.n == 64 else 2]:
        seconds = played_s(nodes, num_bytes)
        chosen = seconds[unit.choose(cluster, num_bytes)]
        assert chosen <= SLOWER * min(seconds.values())


# ── 3.24: any number of ranks ───────────────────────────────────────────────────────


def double(context: RankContext, unit: ModuleType, name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(context.rank)
    before = torch.randn(13, generator=generator, dtype=torch.float64)
    after = before.clone()
    getattr(unit, name)(context.comm, after)
    return before, after


@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling"])
def test_any_number_of_ranks(unit: ModuleType, name: str) -> None:
    for n in range(1, 18):
        values = simulated(double, n, unit, name).values
        total = torch.stack([before for before, _ in values]).sum(0)
        torch.testing.assert_close(values[0][1], total, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(after, values[0][1]) for _, after in values), n


# ── the groups that the checks use ──────────────────────────────────────────────────


def ask_for_too_much(context: RankContext) -> list[str]:
    group = Members(context.comm, range(context.world_size))
    said = []
    try:
        group.barrier()
    except CommRefusedError as error:
        said.append(str(error))
    try:
        group.send(torch.ones(1), 5)
    except CommRefusedError as error:
        said.append(str(error))
    return said


def test_members_have_messages_only_and_no_strangers() -> None:
    for first, second in simulated(ask_for_too_much, 2).values:
        assert "comm.barrier" in first
        assert re.search(r"\b5\b", second)
