"""What the walkthrough of phase 3 shows: methods that run ranks and give plain data."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.experiments import phase3_rank as rank
from distlab.experiments.digits import PRELOADS
from distlab.experiments.walkthrough import Ranks
from distlab.runner import Limits
from distlab.sim import AlphaBeta, Fabric, Network, SimRun
from distlab.sim.net.links import PS

LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
"""A good data centre: 10 µs, 100 Gbit/s."""
ON_NODES = Fabric(node_size=8, nics=8, nic_bytes_per_s=50e9, oversub=4.0)
"""Nodes of 8 GPUs with a NIC each; the uplinks are 4:1 oversubscribed."""
SUMS = {
    "naive": ("collectives", "all_reduce"),
    "ring": ("ring_allreduce", "all_reduce"),
    "recursive doubling": ("topology", "recursive_doubling"),
    "halving doubling": ("topology", "halving_doubling"),
}
"""By name: unit and function."""
ESTIMATED = ("naive", "ring", "recursive doubling")
BUCKETS_NET = AlphaBeta(alpha_s=20e-6, bytes_per_s=0.125e9)
_LIMITS = Limits(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A backward() with buckets on one rank: when each left, arrived, and the end."""

    launches: tuple[tuple[float, int], ...]
    transfers: tuple[tuple[float, float], ...]
    ended_s: float


class Walkthrough(Ranks):
    """Ranks, and what they do in phase 3."""

    def __init__(self) -> None:
        super().__init__(3, (*PRELOADS, "distlab.experiments.phase3_rank"))

    def on_many(
        self,
        unit: str,
        world_size: int,
        scenario: Callable[..., Any],
        *,
        net: Network = LINK,
        **values: Any,
    ) -> SimRun:
        """Run `scenario` in the simulated cluster, to its end; no message is kept."""
        options = {"net": net, "limits": _LIMITS, "journal": False, "trace": False}
        done = self._simulated(unit, world_size, scenario, values, **options)
        done.require_finished()
        return done

    def ring_steps(self, n: int) -> list[dict[str, list[int]]]:
        """By rank: what is in each chunk before the first step and after each."""
        seen = self.on_many("ring_allreduce", n, rank.ring_step_by_step).values
        names = ["before", *(f"step {i}" for i in range(1, len(seen[0])))]
        return [dict(zip(names, rows, strict=True)) for rows in seen]

    def sum_s(self, name: str, n: int, num_bytes: int, net: Network = LINK) -> SimRun:
        """One of SUMS on n ranks."""
        unit, function = SUMS[name]
        values = {"function": function, "num_bytes": num_bytes}
        return self.on_many(unit, n, rank.one_sum, net=net, **values)

    def estimates(
        self, n: int, sizes: Sequence[int], link: AlphaBeta = LINK
    ) -> dict[str, list[float]]:
        """The learner's estimates: by name, a value for each size."""
        told = self.run(
            "topology",
            1,
            rank.estimates,
            n=n,
            sizes=tuple(sizes),
            link=(link.alpha_s, link.bytes_per_s),
        ).values[0]
        return {name: [row[name] for row in told] for name in ESTIMATED}

    def on_nodes(self, n: int, num_bytes: int) -> dict[str, tuple[float, float]]:
        """Seconds of three all-reduces, and of work of the busiest uplink in each."""
        runs = {
            name: self.sum_s(name, n, num_bytes, ON_NODES)
            for name in ("ring", "recursive doubling")
        }
        runs["hierarchical"] = self.on_many(
            "topology",
            n,
            rank.one_sum_on_nodes,
            net=ON_NODES,
            node_size=ON_NODES.node_size,
            num_bytes=num_bytes,
        )
        return {name: (run.time_s, hottest_s(run)) for name, run in runs.items()}

    def choices(self, counts: Sequence[int], sizes: Sequence[int]) -> list[list[str]]:
        """What the learner's choose picks on ON_NODES: rows of n, columns of size."""
        picked: list[list[str]] = self.run(
            "topology",
            1,
            rank.choices,
            counts=tuple(counts),
            sizes=tuple(sizes),
            node_size=ON_NODES.node_size,
            intra_node=(ON_NODES.intra_node_alpha_s, ON_NODES.intra_node_bytes_per_s),
            inter_node=(ON_NODES.nic_alpha_s, ON_NODES.nic_bytes_per_s),
            uplink=ON_NODES.nics * ON_NODES.nic_bytes_per_s / ON_NODES.oversub,
        ).values[0]
        return picked

    def backward(self, num_buckets: int, n: int = 8) -> Backward:
        """The learner's DDP on 50 layers, in virtual time."""
        layer_bytes = 4 * rank.LAYER_NUMBERS
        done = self.on_many(
            "distributed_data_parallel",
            n,
            rank.one_backward,
            net=BUCKETS_NET,
            bucket_mib=layer_bytes * rank.LAYERS / num_buckets / 2**20,
        )
        told = done.values[0]
        transfers, free_s = [], 0.0
        for launched_s, num_bytes in told["launches"]:
            begin = max(launched_s, free_s)
            chunk_s = BUCKETS_NET.message_s(num_bytes / n)
            free_s = begin + 2 * (n - 1) * chunk_s
            transfers.append((begin, free_s))
        return Backward(
            launches=tuple(map(tuple, told["launches"])),
            transfers=tuple(transfers),
            ended_s=told["ended_s"],
        )

    def beside_torch(
        self, caps_mib: Sequence[float], n: int = 8
    ) -> dict[str, list[float]]:
        """Virtual seconds of a step by bucket size: the learner's DDP, and torch's."""
        unit, values = "distributed_data_parallel", {"caps_mib": tuple(caps_mib)}
        run = self.run(unit, 1, rank.beside_torch, n=n, **values)
        times: dict[str, list[float]] = run.values[0]
        return times

    def real_ratio(self) -> float:
        """The learner's step by torch's on two real ranks: the median over steps."""
        with tempfile.TemporaryDirectory() as folder:
            unit, meeting = "distributed_data_parallel", f"{folder}/meeting"
            run = self.run(unit, 2, rank.real_steps, meeting=meeting)
        ratios: list[float] = run.values[0]
        return statistics.median(ratios)

    def held(self, n: int = 4) -> list[dict[str, int]]:
        """What a rank holds at stages 1, 2 and 3, and the formula's figure."""
        return [
            self.on_many("sharded_optimizer", n, rank.held_bytes, stage=stage).values[0]
            for stage in (1, 2, 3)
        ]


def hottest_s(run: SimRun) -> float:
    """Seconds for which the busiest link out of a node was busy."""
    ups = [ps for name, ps in run.links.items() if ".up" in name]
    return max(ups, default=0) / PS
