"""Measure for the lab of phase 3: each method runs ranks and returns rows.

Simulated runs are in virtual time, so every machine gets the same times. Only
`own_link` and `real_ratio` read this machine's clock.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distlab.runner import Limits
from distlab.sim import AlphaBeta, Fabric, Faults, Network, SimRun
from distlab.training.digits import PRELOADS
from distlab.walkthroughs import phase3_rank as rank
from distlab.walkthroughs import phase3_server_rank as server
from distlab.walkthroughs import phase3_services_rank as services
from distlab.walkthroughs import phase3_zero_rank as zero
from distlab.walkthroughs.base import Ranks
from distlab.walkthroughs.phase3_services import NUM_WORKERS, Services

Rows = Mapping[str, Mapping[str, float]]
"""A table: a row for each label, and in it a number for each column."""

LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
"""A good data center: 10 µs, 100 Gbit/s."""
ON_NODES = Fabric(node_size=8, nics=8, nic_bytes_per_s=50e9, oversub=4.0)
"""Nodes of 8 GPUs with a NIC each, whose uplinks are 4:1 oversubscribed."""
SUMS = {
    "naive": ("collectives", "all_reduce"),
    "ring": ("ring_allreduce", "all_reduce"),
    "recursive doubling": ("topology", "recursive_doubling"),
    "halving doubling": ("topology", "halving_doubling"),
}
"""By name: unit and function."""
BUCKETS_BYTES_PER_S = 0.125e9
SEGMENTED_RANKS = 4
_LIMITS = Limits(seconds=120)


@dataclass(frozen=True, kw_only=True)
class OwnLink:
    """α and β of this machine, and the times they predict for the learner's ring."""

    alpha_s: float
    s_per_byte: float
    rows: Rows  # µs by KiB: a message and the ring, measured and estimated


class Walkthrough(Ranks):
    """The experiments of phase 3, which run on ranks."""

    def __init__(self) -> None:
        modules = (rank, zero, services, server)
        super().__init__(3, (*PRELOADS, *(module.__name__ for module in modules)))
        self.services = Services(self.run, self._step_of_a_ring_s)

    def on_many(
        self,
        unit: str,
        world_size: int,
        scenario: Callable[..., Any],
        *,
        net: Network = LINK,
        faults: Faults | None = None,
        **values: Any,
    ) -> SimRun:
        """Run `scenario` in the simulated cluster until it ends, keeping no message."""
        options = {"net": net, "limits": _LIMITS, "journal": False, "trace": False}
        options["faults"] = faults
        done = self._simulated(unit, world_size, scenario, values, **options)
        done.require_finished()
        return done

    # ── all-reduce ──────────────────────────────────────────────────────────────────

    def sum_us(
        self,
        name: str,
        n: int,
        num_bytes: int,
        net: Network = LINK,
        faults: Faults | None = None,
    ) -> float:
        """Return the virtual µs of one of SUMS, or of "hierarchical", on n ranks.

        Raises:
            ValueError: a rank has a wrong sum.
        """
        scenario: Callable[..., bool]
        values: dict[str, Any]
        if name == "hierarchical":
            unit, scenario = "topology", rank.one_sum_on_nodes
            values = {"node_size": ON_NODES.node_size, "num_bytes": num_bytes}
        else:
            (unit, function), scenario = SUMS[name], rank.one_sum
            values = {"function": function, "num_bytes": num_bytes}
        run = self.on_many(unit, n, scenario, net=net, faults=faults, **values)
        if not all(run.values):
            raise ValueError(f"{name} on {n} ranks: a rank has a wrong sum")
        return 1e6 * run.time_s

    def _step_of_a_ring_s(self, num_bytes: int) -> float:
        return 1e-6 * self.sum_us("ring", NUM_WORKERS, num_bytes, server.SLOW_LINK)

    def scaling(self, counts: Sequence[int], num_bytes: int) -> Rows:
        """Return µs of three all-reduces and their estimates, by number of ranks."""
        rows = {}
        for n in counts:
            [estimate] = self.estimates(n, [num_bytes])
            rows[f"{n}"] = {
                "ring": self.sum_us("ring", n, num_bytes),
                "ring, estimate": 1e6 * estimate["ring"],
                "recursive doubling": self.sum_us("recursive doubling", n, num_bytes),
                "recursive doubling, estimate": 1e6 * estimate["recursive doubling"],
                "halving doubling": self.sum_us("halving doubling", n, num_bytes),
            }
        return rows

    def estimates(
        self, n: int, sizes: Sequence[int], link: AlphaBeta = LINK
    ) -> list[dict[str, float]]:
        """Return the result of the learner's estimate_time for each size."""
        estimates: list[dict[str, float]] = self.run(
            "topology",
            1,
            rank.estimates,
            n=n,
            sizes=tuple(sizes),
            link=(link.alpha_s, link.bytes_per_s),
        ).values[0]
        return estimates

    def with_straggler(
        self, slow_rank: int, factor: float, n: int = 8, num_bytes: int = 2**23
    ) -> Rows:
        """Return µs by algorithm, with equal links and with one slow link."""
        faults = Faults(straggler={slow_rank: factor})
        rows = {}
        for name in SUMS:
            equal = self.sum_us(name, n, num_bytes)
            slow = self.sum_us(name, n, num_bytes, faults=faults)
            rows[name] = {"equal": equal, "straggler": slow, "ratio": slow / equal}
        return rows

    def segments(
        self, latency_us: float, sizes_kib: Sequence[int], num_bytes: int = 2**22
    ) -> Rows:
        """Return virtual µs of both rings, pipelined and plain, by segment size."""
        seconds: list[dict[str, float]] = self.run(
            "ring_allreduce",
            1,
            rank.segmented,
            n=SEGMENTED_RANKS,
            num_bytes=num_bytes,
            segment_bytes=tuple(1024 * size for size in sizes_kib),
            alpha_s=1e-6 * latency_us,
            bytes_per_s=LINK.bytes_per_s,
        ).values[0]
        return {
            f"{size}": {name: 1e6 * s for name, s in row.items()}
            for size, row in zip(sizes_kib, seconds, strict=True)
        }

    def own_link(self, n: int, sizes_kib: Sequence[int]) -> OwnLink:
        """Fit α and β to messages of two processes, and predict the ring of n."""
        sizes, unit = [1024 * size for size in sizes_kib], "ring_allreduce"
        values = self.run(unit, n, rank.real_times, sizes=tuple(sizes)).values
        messages_s = np.max([value["message"] for value in values[:2]], axis=0)
        rings_s = np.max([value["ring"] for value in values], axis=0)
        alpha_s, s_per_byte = fit(sizes, messages_s)
        link = AlphaBeta(alpha_s=alpha_s, bytes_per_s=1 / s_per_byte)
        estimates = self.estimates(n, sizes, link)
        rows = {
            f"{kib}": {
                "message": 1e6 * messages_s[row],
                "message, estimate": 1e6 * link.message_s(sizes[row]),
                "ring": 1e6 * rings_s[row],
                "ring, estimate": 1e6 * estimates[row]["ring"],
            }
            for row, kib in enumerate(sizes_kib)
        }
        return OwnLink(alpha_s=alpha_s, s_per_byte=s_per_byte, rows=rows)

    def oversubscribed(
        self, ratios: Sequence[float], num_bytes: int, n: int = 32
    ) -> Rows:
        """Return µs of three all-reduces on nodes, by oversubscription."""
        names = ("ring", "recursive doubling", "hierarchical")
        return {
            f"{ratio:g}": {
                name: self.sum_us(name, n, num_bytes, replace(ON_NODES, oversub=ratio))
                for name in names
            }
            for ratio in ratios
        }

    def choices(
        self, ratio: float, counts: Sequence[int], sizes: Sequence[int]
    ) -> list[list[str]]:
        """Return the learner's choices, with a row per n and a column per size.

        `ratio` is the oversubscription of the uplinks of ON_NODES.
        """
        net = replace(ON_NODES, oversub=ratio)
        choices: list[list[str]] = self.run(
            "topology",
            1,
            rank.choices,
            counts=tuple(counts),
            sizes=tuple(sizes),
            node_size=net.node_size,
            intra_node=(net.intra_node_alpha_s, net.intra_node_bytes_per_s),
            inter_node=(net.nic_alpha_s, net.nic_bytes_per_s),
            uplink=net.nics * net.nic_bytes_per_s / net.oversub,
        ).values[0]
        return choices

    # ── DistributedDataParallel ─────────────────────────────────────────────────────

    def bucket_times(
        self, counts: Sequence[int], latencies_us: Sequence[float], n: int = 8
    ) -> Rows:
        """Return virtual ms of a backward() by number of buckets and latency."""
        return {
            f"{count}": {
                f"α = {latency:g} µs": self._backward_ms(count, latency, n)
                for latency in latencies_us
            }
            for count in counts
        }

    def _backward_ms(self, num_buckets: int, latency_us: float, n: int) -> float:
        layer_bytes = 4 * rank.LAYER_NUMBERS
        net = AlphaBeta(alpha_s=1e-6 * latency_us, bytes_per_s=BUCKETS_BYTES_PER_S)
        done = self.on_many(
            "distributed_data_parallel",
            n,
            rank.one_backward,
            net=net,
            bucket_mib=layer_bytes * rank.LAYERS / num_buckets / 2**20,
        )
        return 1e3 * float(max(done.values))

    def beside_torch(self, caps_mib: Sequence[float], n: int = 8) -> Rows:
        """Return virtual µs of a step by bucket size, for both classes of DDP."""
        unit, values = "distributed_data_parallel", {"caps_mib": tuple(caps_mib)}
        run = self.run(unit, 1, rank.beside_torch, n=n, **values)
        seconds: dict[str, list[float]] = run.values[0]
        return {
            f"{cap:g}": {name: 1e6 * times[row] for name, times in seconds.items()}
            for row, cap in enumerate(caps_mib)
        }

    def own_script(
        self, text: str, counts: Sequence[int], flops_per_s: float
    ) -> tuple[Rows, str]:
        """Run a script with the learner's DDP on simulated ranks.

        Returns ms of simulated time by number of ranks, and how many of them are
        exposed communication; and what rank 0 printed on the most ranks.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.py"
            path.write_text(text, encoding="utf-8")
            unit, values = "distributed_data_parallel", {"flops_per_s": flops_per_s}
            run = self.run(
                unit,
                1,
                rank.own_script,
                path=str(path),
                counts=tuple(counts),
                **values,
            )
        told: dict[str, Any] = run.values[0]
        rows = {
            f"{n}": {
                "all-reduces": found["calls"],
                "ms": 1e3 * found["time_s"],
                "ms exposed": 1e3 * found["exposed_s"],
            }
            for n, found in zip(counts, told["figures"], strict=True)
        }
        return rows, told["printed"]

    def real_ratio(self) -> float:
        """Return the median ratio of the learner's step to torch's, on real ranks."""
        with tempfile.TemporaryDirectory() as folder:
            unit, meeting = "distributed_data_parallel", f"{folder}/meeting"
            run = self.run(unit, 2, rank.real_steps, meeting=meeting)
        ratios: list[float] = run.values[0]
        return statistics.median(ratios)

    # ── ZeRO ────────────────────────────────────────────────────────────────────────

    def sent_units(self, num_backwards: int, n: int = 4) -> Rows:
        """Return how much a rank sends per step, by stage, in units of (n - 1) / n · N.

        Stage 0 is the learner's DistributedDataParallel. All but the last backward() of
        its step are under no_sync().
        """
        values: dict[str, Any] = {"num_backwards": num_backwards}
        runs = [
            self.on_many("distributed_data_parallel", n, zero.sent_by_ddp, **values),
            *(
                self.on_many(
                    "sharded_optimizer", n, zero.sent_by_stage, stage=stage, **values
                )
                for stage in (1, 2, 3)
            ),
        ]
        unit = (n - 1) / n * zero.NUM_BYTES
        labels = ("until backward() ends", "after backward()")
        return {
            f"stage {stage}": {
                label: max(value[row] for value in run.values) / unit
                for row, label in enumerate(labels)
            }
            for stage, run in enumerate(runs)
        }

    def gradient_bytes(self, n: int, num_layers: int) -> Rows:
        """Return rank 0's gradients in kB by moment of a step, for stages 1 and 2.

        A layer has two moments: when its gradient is ready, and when its hooks have
        returned.
        """
        held = [
            self.on_many(
                "sharded_optimizer",
                n,
                zero.gradient_bytes,
                stage=stage,
                num_layers=num_layers,
            ).values[0]
            for stage in (1, 2)
        ]
        layers = range(num_layers, 0, -1)
        moments = [f"layer {k}, {what}" for k in layers for what in ("ready", "done")]
        return {
            moment: {"stage 1": held[0][row] / 1e3, "stage 2": held[1][row] / 1e3}
            for row, moment in enumerate([*moments, "reduce_gradients"])
        }


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit α and β of α + β·bytes, with the least sum of squared relative errors."""
    times = np.array(seconds)
    columns = np.stack([np.ones(len(times)), np.array(sizes, float)], axis=1)
    alpha_s, s_per_byte = np.linalg.lstsq(
        columns / times[:, None], np.ones(len(times)), rcond=None
    )[0]
    return max(float(alpha_s), 0.0), float(s_per_byte)
