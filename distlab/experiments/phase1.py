"""What the walkthrough of phase 1 shows: ranks run, and plain data comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.experiments import phase1_rank as rank
from distlab.experiments.digits import (
    PRELOADS,
    DigitsConfig,
    DigitsResult,
    train_alone,
    train_on_ranks,
)
from distlab.experiments.walkthrough import Ranks
from distlab.sim import AlphaBeta

NETWORKS = {
    "laptop, sockets": AlphaBeta(alpha_s=30e-6, bytes_per_s=1e9),
    "8 GPUs, NVLink": AlphaBeta(alpha_s=3e-6, bytes_per_s=300e9),
    "64 nodes, Ethernet": AlphaBeta(alpha_s=20e-6, bytes_per_s=3e9),
}
"""Round figures for three kinds of link, to be compared with each other."""


class Walkthrough(Ranks):
    """Ranks, and what they do in phase 1."""

    def __init__(self) -> None:
        super().__init__(1, PRELOADS)

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
