"""What the walkthrough of phase 2 shows: ranks that run, and tables made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distlab.experiments import phase2_rank as rank
from distlab.experiments.phase2_code import choose_units
from distlab.experiments.phase2_mesh import (
    LAYOUTS,
    PRELOADS,
    MeshConfig,
    MeshResult,
    train_alone,
    train_on_mesh,
)
from distlab.experiments.walkthrough import Ranks
from distlab.grading.checks.pipeline_race import BACKWARD_MS, FORWARD_MS
from distlab.models.transformer import TransformerConfig
from distlab.sim import AlphaBeta
from distlab.sim.plans.closed_forms import gpipe_s

AT_ONCE = AlphaBeta(alpha_s=0.0, bytes_per_s=float("inf"))
"""A network on which no message takes any time."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A schedule as it is played: a row per rank, an entry per unit of time."""

    text: str
    rows: tuple[tuple[str, ...], ...]

    def live(self, rank: int) -> list[int]:
        """How many microbatches' activations a rank keeps, at each unit of time."""
        row, kept, counts = self.rows[rank], 0, []
        for place, entry in enumerate(row):
            starts = place == 0 or row[place - 1] != entry
            kept += entry.startswith("F") and starts
            counts.append(kept)
            ends = place + 1 == len(row) or row[place + 1] != entry
            kept -= entry.startswith("B") and ends
        return counts


class Walkthrough(Ranks):
    """Ranks, and what they do in phase 2."""

    def __init__(self) -> None:
        preloads = (
            "distlab.grading.warmup:one_step",
            "distlab.experiments.phase2_memory",
            "distlab.experiments.phase2_rank",
        )
        super().__init__(2, (*PRELOADS, *preloads))

    def cut(self, costs: Sequence[float], num_stages: int) -> list[list[int]]:
        """The learner's stages of layers that cost that much."""
        unit, values = "model_parallel", {"costs": tuple(costs)}
        run = self.run(unit, 1, rank.cut_layers, num_stages=num_stages, **values)
        stages: list[list[int]] = run.values[0]
        return stages

    def schedule(self, name: str, num_ranks: int, num_microbatches: int) -> Played:
        """The learner's lists for all ranks, and when their entries come to be done."""
        run = self.run(
            "pipeline_parallel",
            1,
            rank.drawn_schedules,
            name=name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
        )
        text: str = run.values[0]
        rows = [tuple(line.split()[2:]) for line in text.splitlines()[:-1]]
        length = max(map(len, rows))
        filled = tuple(row + (".",) * (length - len(row)) for row in rows)
        return Played(text=text, rows=filled)

    def bubbles(
        self, num_ranks: int, counts: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """The share of time a rank is idle, by m: as simulated, and by the formula."""
        run = self.simulate(
            "pipeline_parallel",
            num_ranks,
            rank.pipeline_times,
            net=AT_ONCE,
            counts=tuple(counts),
        )
        run.require_finished()
        step_s = (FORWARD_MS + BACKWARD_MS) / 1000
        forward_s, backward_s = FORWARD_MS / 1000, BACKWARD_MS / 1000
        took_s = [max(times) for times in zip(*run.values, strict=True)]
        seen = [1 - m * step_s / t for m, t in zip(counts, took_s, strict=True)]
        formula = [
            1 - m * step_s / gpipe_s(num_ranks, m, forward_s, backward_s)
            for m in counts
        ]
        return seen, formula

    def train(self, num_steps: int) -> dict[str, MeshResult]:
        """One process, and both meshes of 2 × 2 ranks."""
        config, units = MeshConfig(num_steps=num_steps), choose_units(None)
        results = {"1 process": train_alone(config)}
        for layout in LAYOUTS:
            results[layout] = train_on_mesh(self._cluster, config, layout, units)
        return results


def layer_costs(config: TransformerConfig) -> dict[str, float]:
    """Multiplications per token of each layer: looking a token up takes none."""
    c, t = config.dim, config.context
    block = (
        12.0 * c * c + 2 * t * c
    )  # qkv, proj, up and down; then scores and their sum
    blocks = {f"block {number}": block for number in range(config.num_layers)}
    return {"embedding": 0.0, **blocks, "head": float(c * config.vocab_size)}


def evenly(num_layers: int, num_stages: int) -> list[list[int]]:
    """Stages of equally many layers, whatever they cost."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [list(range(*pair)) for pair in pairwise(ends)]
