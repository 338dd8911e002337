"""Run ranks for the walkthrough of phase 2, and return tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distlab.grading.checks.pipeline_parallel.race import BACKWARD_MS, FORWARD_MS
from distlab.models.transformer import TransformerConfig
from distlab.sim import AlphaBeta
from distlab.training.mesh import (
    LAYOUTS,
    PRELOADS,
    MeshConfig,
    compare,
    train_alone,
    train_on_mesh,
)
from distlab.training.mesh_code import choose_units
from distlab.walkthroughs import phase2_memory as memory
from distlab.walkthroughs import phase2_rank as rank
from distlab.walkthroughs.base import Ranks

Rows = dict[str, dict[str, float]]
"""A table: the values of each row by column."""

AT_ONCE = AlphaBeta(alpha_s=0.0, bytes_per_s=float("inf"))
"""A network on which no message takes any time."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A schedule as ranks run it, with a row per rank and an entry per unit of time."""

    text: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def idle(self) -> list[int]:
        """Count the units of time in which each rank is idle."""
        return [row.count(".") for row in self.rows]

    @property
    def num_chunks(self) -> int:
        """Count a rank's model chunks. In `rows`, chunk 2 is F0''."""
        return 1 + max(entry.count("'") for row in self.rows for entry in row)

    def blocks(self, rank: int) -> list[tuple[str, int, int]]:
        """Return the entries of a rank with start and length, in units of time."""
        starts: list[tuple[str, int, int]] = []
        for time, entry in enumerate(self.rows[rank]):
            if starts and starts[-1][0] == entry:
                starts[-1] = entry, starts[-1][1], starts[-1][2] + 1
            else:
                starts.append((entry, time, 1))
        return [block for block in starts if block[0] != "."]

    def live(self, rank: int) -> list[int]:
        """Count the microbatches whose activations a rank keeps over time."""
        blocks = self.blocks(rank)
        begun = [start for entry, start, _ in blocks if entry.startswith("F")]
        ends = [start + n for entry, start, n in blocks if entry.startswith("B")]
        return [
            sum(start <= time for start in begun) - sum(end <= time for end in ends)
            for time in range(len(self.rows[rank]))
        ]


@dataclass(frozen=True, kw_only=True)
class ScaleStep:
    """One step with loss scaling. The lists have an entry per rank."""

    scale: float
    without_overflow: float
    finite: list[bool]
    stepped: list[bool]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The layers of each stage and their costs, for one way to partition a model."""

    layers: tuple[Mapping[str, float], ...]

    @property
    def costs(self) -> list[float]:
        """The cost of each stage."""
        return [sum(stage.values()) for stage in self.layers]


class Walkthrough(Ranks):
    """The experiments of phase 2. Most methods return the rows of a table."""

    def __init__(self) -> None:
        preloads = (
            "distlab.grading.warmup:one_step",
            "distlab.walkthroughs.phase2_memory",
            "distlab.walkthroughs.phase2_rank",
        )
        super().__init__(2, (*PRELOADS, *preloads))

    def memory_of_a_step(self, batch_sizes: Sequence[int], optimizer: str) -> Rows:
        """Return the MB of one training step by purpose, for each batch size."""
        rows = {}
        for size in batch_sizes:
            run = self.run(
                "model_parallel",
                1,
                memory.memory_of_a_step,
                batch_size=size,
                optimizer=optimizer,
            )
            rows[f"{size}"] = _in_mb(run.values[0])
        return rows

    def accumulation(self, num_sequences: int, counts: Sequence[int]) -> Rows:
        """Return the MB that one of two ranks sends and keeps, for each K."""
        run = self.run(
            "gradient_accumulation",
            2,
            memory.accumulate,
            num_sequences=num_sequences,
            counts=tuple(counts),
        )
        return {
            f"K = {row['K']}": _in_mb(
                {
                    "sent by sync_once": row["once"],
                    "sent after each microbatch": row["each"],
                    "activations": row["kept"],
                }
            )
            for row in run.values[0]
        }

    def checkpoint_groups(self, num_layers: int) -> Rows:
        """Return the peak and the forward passes, by layers per checkpointed group."""
        run = self.run(
            "activation_checkpointing",
            1,
            memory.checkpoint_groups,
            num_layers=num_layers,
        )
        return {
            f"groups of {row['g']}" if row["g"] else "no checkpointing": {
                "peak": row["peak"],
                "layers run forward": row["forwards"],
            }
            for row in run.values[0]
        }

    def tiny_updates(self, first_weight: float, updates: Sequence[float]) -> Rows:
        """Return the fraction of 100 updates that arrives in a bfloat16 weight."""
        run = self.run(
            "mixed_precision",
            1,
            rank.tiny_updates,
            first_weight=first_weight,
            updates=tuple(updates),
            num_steps=100,
        )
        return {
            f"{update:g}": {
                "bfloat16 alone": row["alone"],
                "with float32 master weights": row["master"],
            }
            for update, row in zip(updates, run.values[0], strict=True)
        }

    def loss_scale(
        self, overflow_steps: Sequence[int], growth_interval: int, num_steps: int
    ) -> list[ScaleStep]:
        """Return two ranks' loss scale by step, if rank 1's gradient overflows."""
        values = {"num_steps": num_steps, "growth_interval": growth_interval}
        without, with_overflow = (
            self.run(
                "mixed_precision", 2, rank.loss_scale, overflow_steps=steps, **values
            ).values
            for steps in ((), tuple(overflow_steps))
        )
        return [
            ScaleStep(
                scale=both[0]["scale"],
                without_overflow=plain["scale"],
                finite=[report["finite"] for report in both],
                stepped=[report["stepped"] for report in both],
            )
            for plain, *both in zip(without[0], *with_overflow, strict=True)
        ]

    def stages(self, vocab_size: int, num_stages: int) -> dict[str, Stages]:
        """Divide a transformer into equal stages, and into the learner's stages.

        Costs are in thousands of multiplications per token.
        """
        config = TransformerConfig(
            vocab_size=vocab_size, context=32, dim=64, num_layers=6
        )
        costs = layer_costs(config)
        run = self.run(
            "model_parallel",
            1,
            rank.cut_layers,
            costs=tuple(costs.values()),
            num_stages=num_stages,
        )
        names = list(costs)
        return {
            way: Stages(
                layers=tuple(
                    {names[layer]: costs[names[layer]] / 1000 for layer in stage}
                    for stage in stages
                )
            )
            for way, stages in {
                "equal count": evenly(len(costs), num_stages),
                "partition": run.values[0],
            }.items()
        }

    def schedules(
        self, num_ranks: int, num_microbatches: int, num_chunks: int
    ) -> dict[str, Played]:
        """Return the learner's schedules as the ranks run them.

        A forward pass takes `num_chunks`, so that of one model chunk of interleaved
        1F1B takes 1. We leave interleaved 1F1B out if the ranks do not divide the
        microbatches.
        """
        names = {"GPipe": "gpipe", "1F1B": "one_f_one_b"}
        if num_microbatches % num_ranks == 0:
            names["interleaved 1F1B"] = "interleaved"
        return {
            label: self._schedule(name, num_ranks, num_microbatches, num_chunks)
            for label, name in names.items()
        }

    def _schedule(
        self, name: str, num_ranks: int, num_microbatches: int, num_chunks: int
    ) -> Played:
        run = self.run(
            "pipeline_parallel",
            1,
            rank.drawn_schedules,
            name=name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            ticks=1 if name == "interleaved" else num_chunks,
        )
        text: str = run.values[0]
        rows = [tuple(line.split()[2:]) for line in text.splitlines()[:-1]]
        length = max(map(len, rows))
        filled = tuple(row + (".",) * (length - len(row)) for row in rows)
        return Played(text=text, rows=filled)

    def pipeline_memory(self, num_microbatches: int, microbatch_size: int) -> Rows:
        """Return the peak of activations in MB on each of four ranks, by schedule."""
        run = self.run(
            "pipeline_parallel",
            4,
            memory.pipeline_memory,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
        )
        return {
            f"rank {number}": _in_mb(
                {"GPipe": peaks["gpipe"], "1F1B": peaks["one_f_one_b"]}
            )
            for number, peaks in enumerate(run.values)
        }

    def bubbles(self, num_ranks: int, counts: Sequence[int], num_chunks: int) -> Rows:
        """Return the fraction of time that a rank is idle, simulated and by formula."""
        run = self.simulate(
            "pipeline_parallel",
            num_ranks,
            rank.pipeline_times,
            net=AT_ONCE,
            counts=tuple(counts),
            num_chunks=num_chunks,
        )
        run.require_finished()
        step_s = (FORWARD_MS + BACKWARD_MS) / 1000
        rows: Rows = {}
        for m, times in zip(counts, zip(*run.values, strict=True), strict=True):
            rows[f"m = {m}"] = row = {}
            for label, v in (("1F1B", 1), ("interleaved", num_chunks)):
                took_s = max(report[label] for report in times)
                row[label] = 1 - m * v * step_s / took_s
                row[f"{label}, formula"] = (num_ranks - 1) / (m * v + num_ranks - 1)
        return rows

    def train_without(self, left_out: str, num_steps: int) -> Rows:
        """Return rank 0's loss in each step, with all operators and without one.

        Raises:
            ValueError: `left_out` is neither f nor g.
        """
        if left_out not in ("f", "g"):
            raise ValueError(f"{left_out!r} cannot be left out, only 'f' or 'g'")
        run = self.run(
            "tensor_parallel",
            2,
            rank.train_without,
            left_out=left_out,
            num_steps=num_steps,
        )
        curves: dict[str, list[float]] = run.values[0]
        return {
            f"step {number}": {label: curve[number] for label, curve in curves.items()}
            for number in range(num_steps)
        }

    def sequence_lengths(
        self, num_ranks: int, lengths: Sequence[int]
    ) -> tuple[Rows, Rows]:
        """Return the MB that a rank sends, and keeps as activations, by length."""
        run = self.run(
            "tensor_parallel",
            num_ranks,
            memory.sequence_lengths,
            lengths=tuple(lengths),
        )
        sent, kept = (
            {
                f"T = {length}": _in_mb(
                    {way: report[what] for way, report in row.items()}
                )
                for length, row in zip(lengths, run.values[0], strict=True)
            }
            for what in ("sent", "kept")
        )
        return sent, kept

    def train(
        self, batch_sizes: Sequence[int], num_steps: int
    ) -> tuple[Rows, dict[str, float]]:
        """Return the MB that a rank of 2 × 2 sends in a step, by batch size and layout.

        Also return the largest difference of a loss from the single-process baseline
        for each layout.
        """
        units = choose_units(None)
        rows: Rows = {}
        errors = dict.fromkeys(LAYOUTS, 0.0)
        for size in batch_sizes:
            config = MeshConfig(batch_size=size, num_steps=num_steps)
            baseline = train_alone(config)
            rows[f"{size}"] = row = {}
            for layout in LAYOUTS:
                result = train_on_mesh(self._cluster, config, layout, units)
                row[layout] = max(result.step_bytes) / 1e6
                errors[layout] = max(errors[layout], compare(result, baseline))
        return rows, {str(layout): error for layout, error in errors.items()}


def _in_mb(num_bytes: Mapping[str, float]) -> dict[str, float]:
    return {label: value / 1e6 for label, value in num_bytes.items()}


def layer_costs(config: TransformerConfig) -> dict[str, float]:
    """Count each layer's multiplications per token. Looking up a token needs none."""
    c, t = config.dim, config.context
    block = (
        12.0 * c * c + 2 * t * c
    )  # qkv, proj, up and down; then scores and their sum
    blocks = {f"block {number}": block for number in range(config.num_layers)}
    return {"embedding": 0.0, **blocks, "head": float(c * config.vocab_size)}


def evenly(num_layers: int, num_stages: int) -> list[list[int]]:
    """Divide the layers into stages of equal numbers, whatever they cost."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [list(range(*pair)) for pair in pairwise(ends)]
