"""What the walkthrough of phase 1 shows: each method runs ranks and gives plain data.

The ranks run the learner's code, task by task, where it is finished, and otherwise the
reference's: `distlab use` and DISTLAB_IMPL decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.curriculum.units import travelling
from distlab.experiments import phase1_rank as rank
from distlab.experiments.digits import (
    PRELOADS,
    DigitsConfig,
    DigitsResult,
    train_alone,
    train_on_ranks,
)
from distlab.grading.bench import (
    Bench,
    Implementation,
    needed_reference,
    off_limits,
    perform,
)
from distlab.runner import Cluster, Limits, Run
from distlab.runner.rank import name_of
from distlab.sim import AlphaBeta, SimRun, run_apart

_LIMITS = Limits(seconds=60)
NETWORKS = {
    "laptop, sockets": AlphaBeta(alpha_s=30e-6, bytes_per_s=1e9),
    "8 GPUs, NVLink": AlphaBeta(alpha_s=3e-6, bytes_per_s=300e9),
    "64 nodes, Ethernet": AlphaBeta(alpha_s=20e-6, bytes_per_s=3e9),
}
"""Round figures for three kinds of link, to be compared with each other."""


class Walkthrough:
    """Warm ranks on this machine, simulated ones, and the units they run."""

    def __init__(self) -> None:
        self._curriculum = load_curriculum()
        self._cluster = Cluster(preload=PRELOADS)
        self._cluster.start(wait=False)

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._cluster.close()

    def whose_code(self) -> list[str]:
        """A line for each task of the phase: whose code runs, and its digest."""
        units = self._curriculum.phase(1).units
        return [
            line
            for unit in units
            for line in chosen_unit(self._curriculum, unit.name).lines()
        ]

    def run(
        self, unit: str, world_size: int, scenario: Callable[..., Any], **values: Any
    ) -> Run:
        """Run `scenario` on real ranks.

        Raises:
            NotYetError: it did not come to its end; with the verdict.
        """
        bench = Bench(self._cluster, world_size, 0, _LIMITS)
        return bench.run(self._implementation(unit), scenario, **values)

    def simulate(
        self,
        unit: str,
        world_size: int,
        scenario: Callable[..., Any],
        *,
        net: AlphaBeta | None = None,
        **values: Any,
    ) -> SimRun:
        """Run `scenario` in the simulated cluster; a hang is no error there."""
        impl = self._implementation(unit)
        return run_apart(
            self._cluster,
            perform,
            world_size,
            travelling(impl.source),
            needed_reference(impl),
            list(impl.grafts),
            [[name_of(scenario), values]],
            off_limits(impl),
            net=net,
            limits=_LIMITS,
        )

    def train(self, world_size: int, **settings: Any) -> DigitsResult:
        """Train on the digits: on ranks, or alone in plain PyTorch if it is one."""
        config = DigitsConfig(world_size=world_size, **settings)
        if world_size == 1:
            return train_alone(config)
        return train_on_ranks(self._cluster, config)

    def owners(self, num_samples: int, world_size: int, epoch: int) -> list[int]:
        """Which rank reads each sample in this epoch; of several, the last one."""
        owner = [0] * num_samples
        run = self.run(
            "data_loader",
            1,
            rank.samples_of_all,
            num_samples=num_samples,
            num_ranks=world_size,
            epoch=epoch,
        )
        for who, samples in enumerate(run.values[0]):
            for sample in samples:
                owner[sample] = who
        return owner

    def step_times(self, world_sizes: Sequence[int]) -> dict[str, list[float]]:
        """Virtual seconds of one all_reduce of the digits model, on three networks."""
        return {
            name: [
                self.simulate("collectives", n, rank.one_all_reduce, net=net).time_s
                for n in world_sizes
            ]
            for name, net in NETWORKS.items()
        }

    def _implementation(self, unit: str) -> Implementation:
        choice = chosen_unit(self._curriculum, unit)
        return Implementation(choice.source, choice.reference, choice.grafts)
