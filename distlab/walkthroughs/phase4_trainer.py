"""Run the lab of phase 4 on the trainer: a sample's weight, and a run's incidents."""

from __future__ import annotations

from collections.abc import Sequence

from distlab.walkthroughs import phase4_trainer_rank as rank
from distlab.walkthroughs.base import Ranks
from distlab.walkthroughs.tables import Cells


class Trainer(Ranks):
    """Experiments with `train_step` and `incident`."""

    def weights_of_samples(self, num_samples: Sequence[int], num_parts: int) -> Cells:
        """Return each rank's microbatches, and how much one of its samples counts.

        The unit is 1/N, where N is the number of samples in the global batch. A further
        column says how much a sample would count with the weight 1/K for each
        microbatch.
        """
        total = sum(num_samples)
        run = self.run(
            "imagenet_trainer",
            len(num_samples),
            rank.weights_of_samples,
            num_samples=tuple(num_samples),
            num_parts=num_parts,
        )
        rows: dict[str, dict[str, float | str]] = {}
        for number, (sizes, weights) in enumerate(run.values):
            equal = [total / (len(num_samples) * num_parts * size) for size in sizes]
            rows[f"{number}"] = {
                "samples": num_samples[number],
                "microbatches": ", ".join(map(str, sizes)),
                "your train_step": _range([total * weight for weight in weights]),
                "1/K each": _range(equal),
            }
        return rows

    def incidents(self) -> Cells:
        """Return for each recorded run when incident names the cause, and the cost.

        We call incident after each step, with the reports and events up to then.
        """
        rows: dict[str, dict[str, float | str]] = {}
        folder = self._curriculum.root / "phase4_production" / "incidents"
        for path in sorted(folder.glob("*.json")):
            told = self.run("drill", 1, rank.told_by_step, file=str(path)).values[0]
            what, of_rank, step, action, lost = told[-1][1]
            named, then = next((at, own) for at, own in told if own[0] == what)
            rows[path.stem] = {
                "what": what,
                "rank": of_rank,
                "step": step,
                "action": action,
                "named after": named,
                "lost then": then[4],
                "lost at the end": lost,
            }
        return rows


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 5e-3 else f"{low:.2f} to {high:.2f}"
