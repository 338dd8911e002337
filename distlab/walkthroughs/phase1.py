"""Run ranks for the walkthrough of phase 1, and return plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlab.digests import digest
from distlab.sim import AlphaBeta, Faults, SimRun
from distlab.sim.calibration.calibrate import KIB, Measurements, calibrate
from distlab.training.digits import (
    PRELOADS,
    DigitsConfig,
    DigitsResult,
    Mode,
    train_alone,
)
from distlab.walkthroughs import phase1_rank as rank
from distlab.walkthroughs.base import Ranks

ORDERS = (
    "all ranks send first",
    "rank 0 receives first",
    "odd ranks receive first",
    "your ring_shift",
)
COLLECTIVES = ("broadcast", "all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = (
    "broadcast",
    "tree_broadcast",
    "all_reduce",
    "reduce_scatter + all_gather",
)
SAMPLE_S = 20e-6
"""Seconds that forward and backward take per sample in the simulated cluster."""
STEP_ELEMENTS = 250_000
"""Gradients of a simulated step: 1 MB in float32."""
EQUAL = 1e-10
"""We treat weights that differ by less than this as equal up to rounding."""
_SIZES = (64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """α and β of this machine, and the measured times that they were fitted to."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    alpha_s: float
    beta_s: float

    @property
    def net(self) -> AlphaBeta:
        """Return a simulated network with this α and β."""
        return AlphaBeta(alpha_s=self.alpha_s, bytes_per_s=1 / self.beta_s)

    @property
    def fitted(self) -> list[float]:
        """Return the prediction of the α–β model for each size."""
        return [self.alpha_s + self.beta_s * size for size in self.sizes]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run, with the distance from the single-process baseline after each epoch."""

    distances: tuple[float, ...]
    accuracy: float
    num_digests: int


class Walkthrough(Ranks):
    """The experiments of phase 1, which run on ranks."""

    def __init__(self) -> None:
        super().__init__(1, (*PRELOADS, "distlab.walkthroughs.phase1_rank"))

    def ring(self, world_size: int, eager_bytes: int) -> dict[str, SimRun]:
        """Send 1 KiB around a ring in four orders, some of which deadlock."""
        return {
            order: self._simulated(
                "collectives",
                world_size,
                rank.ring,
                {"order": order, "num_bytes": KIB},
                eager_bytes=eager_bytes,
            )
            for order in ORDERS
        }

    def sent_bytes(self, world_size: int, num_elements: int) -> dict[str, list[int]]:
        """Return the bytes that each rank sends, by collective."""
        return {
            name: [
                int(record.sent_bytes or 0)
                for record in self._collective(name, world_size, num_elements).ranks
            ]
            for name in COLLECTIVES
        }

    def collective_times(
        self, world_sizes: Sequence[int], num_elements: int, net: AlphaBeta
    ) -> dict[str, list[float]]:
        """Return virtual seconds of the learner's algorithms, by number of ranks."""
        return {
            name: [
                self._collective(name, n, num_elements, net=net).time_s
                for n in world_sizes
            ]
            for name in ALGORITHMS
        }

    def _collective(
        self, name: str, world_size: int, num_elements: int, **options: Any
    ) -> SimRun:
        values = {"function": name, "num_elements": num_elements}
        run = self._simulated(
            "collectives", world_size, rank.one_collective, values, **options
        )
        run.require_finished()
        return run

    def fit_link(self, seconds: float) -> Fit:
        """Fit α and β to measured messages between two processes."""
        plan = Measurements(sizes=_SIZES, held_out=(), more_ranks=())
        net = calibrate(self._cluster, seconds, plan=plan).net
        sizes = np.array(_SIZES, dtype=float)
        times = np.array(net.back_and_forth_s)
        rows = np.stack([1 / times, sizes / times], axis=1)
        alpha_s, beta_s = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
        return Fit(
            sizes=_SIZES,
            seconds=tuple(map(float, times)),
            alpha_s=max(float(alpha_s), 0.0),
            beta_s=float(beta_s),
        )

    def split_sums(
        self, num_elements: int, calls: Sequence[int], net: AlphaBeta
    ) -> dict[str, list[float]]:
        """Return the seconds of the same sum on two ranks, by number of calls."""
        times: dict[str, list[float]] = {"measured": [], "predicted": []}
        for num_calls in calls:
            values = {"num_elements": num_elements, "num_calls": num_calls}
            real = self.run("collectives", 2, rank.split_sum, **values)
            run = self._simulated("collectives", 2, rank.one_split_sum, values, net=net)
            times["measured"].append(max(real.values))
            times["predicted"].append(run.time_s)
        return times

    def trainings(
        self, world_size: int, rates: dict[Mode, float], num_epochs: int
    ) -> dict[Mode, Trained]:
        """Train on the digits in several modes in the simulated cluster."""
        values = {"num_epochs": num_epochs}
        alone = {"mode": "alone", "learning_rate": rank.RATE, **values}
        baseline = self._training(1, alone)[0][0]
        results: dict[Mode, Trained] = {}
        for mode, rate in rates.items():
            outputs = self._training(
                world_size, {"mode": mode, "learning_rate": rate, **values}
            )
            by_epoch = zip(*(history for history, _ in outputs), strict=True)
            results[mode] = Trained(
                distances=tuple(
                    max(float((own - one).abs().max()) for own in weights)
                    for one, weights in zip(baseline, by_epoch, strict=True)
                ),
                accuracy=outputs[0][1],
                num_digests=len({digest(history[-1]) for history, _ in outputs}),
            )
        return results

    def _training(self, world_size: int, values: dict[str, Any]) -> list[Any]:
        run = self._simulated("trainer", world_size, rank.weights_by_epoch, values)
        run.require_finished()
        return list(run.values)

    def coverage(self, world_size: int, num_epochs: int) -> dict[str, list[int]]:
        """Count how many of the 1,797 digits rank 0 has read after each epoch."""
        values = {"num_ranks": world_size, "num_epochs": num_epochs}
        run = self.run("data_loader", 1, rank.coverage, num_samples=1797, **values)
        counts: dict[str, list[int]] = run.values[0]
        return counts

    def baseline(self, num_epochs: int) -> DigitsResult:
        """Train on the digits in a single process, with global batches of 64."""
        return train_alone(DigitsConfig(world_size=1, epochs=num_epochs))

    def fit(
        self, world_size: int, global_batch_size: int, num_epochs: int
    ) -> DigitsResult:
        """Run the learner's `fit` on real ranks."""
        config = DigitsConfig(
            world_size=world_size,
            epochs=num_epochs,
            global_batch_size=global_batch_size,
        )
        values = {"global_batch_size": global_batch_size, "num_epochs": num_epochs}
        run = self.run("trainer", world_size, rank.fit_digits, **values)
        return DigitsResult(
            config=config,
            losses=tuple(run.values[0][0]),
            accuracies=(),
            weights=tuple(weights for _, weights in run.values),
            epoch_s=0.0,
        )

    def errors_of_means(
        self, first_counts: Sequence[int], *, sort_by_class: bool
    ) -> dict[str, list[float]]:
        """Return the errors of both means if rank 0 has `first_counts` samples."""
        run = self.run(
            "trainer",
            2,
            rank.errors_of_means,
            first_counts=tuple(first_counts),
            batch_size=64,
            sort_by_class=sort_by_class,
        )
        errors: dict[str, list[float]] = run.values[0]
        return errors

    def evaluate(self, counts: Sequence[int]) -> list[dict[str, float]]:
        """Return each rank's counts and the result of the learner's `evaluate`."""
        weights = tuple(self.baseline(2).weights[0].tolist())
        values = {"counts": tuple(counts), "weights": weights}
        run = self.run("trainer", len(counts), rank.evaluate_digits, **values)
        return list(run.values)

    def step_times(
        self,
        world_sizes: Sequence[int],
        global_batch_size: int,
        straggler_factor: float = 1.0,
    ) -> dict[str, list[float]]:
        """Return the virtual seconds of a step in which the last rank may be slower."""
        times: dict[str, list[float]] = {"step": [], "computation": []}
        for n in world_sizes:
            values = {
                "global_batch_size": global_batch_size,
                "sample_s": SAMPLE_S,
                "num_elements": STEP_ELEMENTS,
            }
            factor = straggler_factor if n > 1 else 1.0
            faults = Faults(straggler={n - 1: factor})
            run = self._simulated(
                "collectives", n, rank.timed_step, values, faults=faults
            )
            run.require_finished()
            most = -(-global_batch_size // n)
            slow = global_batch_size // n * factor
            times["step"].append(run.time_s)
            times["computation"].append(max(most, slow) * SAMPLE_S)
        return times


def difference(result: DigitsResult, baseline: DigitsResult) -> float:
    """Return the largest difference between any rank's weights and the baseline's."""
    (expected,) = baseline.weights
    return max(float((own - expected).abs().max()) for own in result.weights)
