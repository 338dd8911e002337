"""Run the lab of phase 4 on compression: bytes, residuals, accuracy, PowerSGD's r."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distlab.walkthroughs import phase4_compression_rank as rank
from distlab.walkthroughs.base import Ranks

UNIT = "gradient_compression"


class Compression(Ranks):
    """Experiments with the hooks of `gradient_compression`."""

    def compressed_bytes(
        self, world_sizes: Sequence[int]
    ) -> Mapping[str, Mapping[str, float]]:
        """Return each hook's bytes in percent of a dense step's, a column per n."""
        columns: dict[str, dict[str, float]] = {}
        for n in world_sizes:
            run = self.simulate(UNIT, n, rank.sent_shares)
            run.require_finished()
            columns[f"{n} ranks"] = run.values[0]
        hooks = next(iter(columns.values()))
        return {
            hook: {name: shares[hook] for name, shares in columns.items()}
            for hook in hooks
        }

    def residuals(
        self, gradients: Sequence[float], ratio: float, num_steps: int
    ) -> list[list[float]]:
        """Return rank 0's residual of each element by step, with the learner's TopK."""
        values: dict[str, Any] = {
            "gradients": tuple(gradients),
            "ratio": ratio,
            "num_steps": num_steps,
        }
        run = self.simulate(UNIT, 2, rank.residuals, **values)
        run.require_finished()
        kept: list[list[float]] = run.values[0]
        return kept

    def accuracies(
        self, ratio: float, epochs: int
    ) -> Mapping[str, Mapping[str, float]]:
        """Return accuracy in percent by epoch, trained by two simulated ranks."""
        found = {}
        for name, mode in (
            ("dense", "dense"),
            ("top-k", "with"),
            ("no error feedback", "without"),
        ):
            values: dict[str, Any] = {"ratio": ratio, "epochs": epochs, "mode": mode}
            run = self.simulate(UNIT, 2, rank.train_digits, **values)
            run.require_finished()
            found[name] = run.values[0]
        return {
            f"{epoch + 1}": {name: percent[epoch] for name, percent in found.items()}
            for epoch in range(epochs)
        }

    def approximations(
        self, ranks: Sequence[int], num_steps: int
    ) -> Mapping[str, Mapping[str, float]]:
        """Return bytes and errors in percent by PowerSGD's r."""
        values: dict[str, Any] = {"ranks": tuple(ranks), "num_steps": num_steps}
        run = self.simulate(UNIT, 4, rank.approximate, **values)
        run.require_finished()
        return {f"r = {r}": row for r, row in run.values[0].items()}
