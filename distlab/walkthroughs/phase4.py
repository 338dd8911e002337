"""Measure for the lab of phase 4: each method runs ranks and returns rows.

Simulated runs are in virtual time, so every machine gets the same times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distlab.curriculum.choose import Choice, chosen_unit
from distlab.curriculum.units import travelling
from distlab.given.monitoring import Spans, read_spans
from distlab.grading.harness import (
    Implementation,
    needed_reference,
    off_limits,
    perform,
)
from distlab.runner import Cluster
from distlab.runner.rank import name_of
from distlab.sim import AlphaBeta, Faults, run_apart
from distlab.training import resumed
from distlab.training.ddp_code import as_parts
from distlab.walkthroughs import (
    phase4_compression_rank,
    phase4_elastic_rank,
    phase4_recovery_rank,
    phase4_trainer_rank,
)
from distlab.walkthroughs import phase4_rank as rank
from distlab.walkthroughs.phase4_compression import Compression
from distlab.walkthroughs.phase4_elastic import Elastic
from distlab.walkthroughs.phase4_recovery import Recovery
from distlab.walkthroughs.phase4_trainer import Trainer
from distlab.walkthroughs.tables import Cells

Rows = Mapping[str, Mapping[str, float]]
"""A table: a row for each label, and in it a number for each column."""

LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
"""A good data center: 10 µs, 100 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The faults in a simulated run, and the unit's findings from its records."""

    faults: dict[str, list[int]]  # by the names of Suspects
    named: dict[str, list[int]]
    ms: list[list[float]]  # by rank: data, compute, communication in the last step


def search(
    cluster: Cluster,
    choice: Choice,
    *,
    n: int,
    factor: float,
    num_steps: int,
    seed: int,
) -> Search:
    """Hide three faults among n simulated ranks, and let the unit search for them.

    One rank takes `factor` times as long, one has a changed weight, and one has a nan.
    """
    draw = random.Random(seed)
    slow, flipped, poisoned = draw.sample(range(n), 3)
    values = {
        "num_steps": num_steps,
        "flipped": (flipped, 1),
        "poisoned": (poisoned, num_steps - 2),
    }
    impl = Implementation(choice.source, choice.reference, choice.grafts)
    run = run_apart(
        cluster,
        perform,
        n,
        travelling(impl.source),
        needed_reference(impl),
        list(impl.grafts),
        [[name_of(rank.hidden_faults), values]],
        off_limits(impl),
        net=LINK,
        faults=Faults(straggler={slow: factor}),
    )
    run.require_finished()
    found = run.values[0]
    return Search(
        faults={
            "stragglers": [slow],
            "desynchronized": [flipped],
            "nan_origin": [poisoned],
        },
        named=found["named"],
        ms=found["ms"],
    )


class Walkthrough(Compression, Recovery, Elastic, Trainer):
    """The experiments of phase 4, which run on ranks."""

    def __init__(self) -> None:
        modules = (
            rank,
            phase4_compression_rank,
            phase4_recovery_rank,
            phase4_elastic_rank,
            phase4_trainer_rank,
        )
        super().__init__(4, tuple(module.__name__ for module in modules))

    # ── monitoring ──────────────────────────────────────────────────────────────────

    def step_shares(self, n: int, stragglers: Mapping[int, float]) -> Rows:
        """Return each part in percent by rank, in one step of n simulated ranks.

        `stragglers` maps ranks to how many times as long they take. The simulator
        records and reports with the learner's functions.
        """
        run = self._simulated(
            "monitoring",
            n,
            rank.recorded_step,
            {},
            net=LINK,
            faults=Faults(straggler=dict(stragglers)),
        )
        run.require_finished()
        shares: dict[int, dict[str, float]] = run.values[0]
        return {
            f"{number}": {part: 100 * value for part, value in own.items()}
            for number, own in sorted(shares.items())
        }

    def search(self, n: int, factor: float, *, seed: int) -> Search:
        """Hide three faults among n ranks, and see which ranks `suspects` names."""
        choice = chosen_unit(self._curriculum, "monitoring")
        return search(self._cluster, choice, n=n, factor=factor, num_steps=6, seed=seed)

    def spans(self) -> dict[str, Spans]:
        """Return the recorded traces of 4.19 by name."""
        return {path.stem: read_spans(path) for path in self._files()}

    def traces(self) -> tuple[Rows, dict[str, str]]:
        """Return each trace's milliseconds and cause, by the learner's code."""
        files = tuple(map(str, self._files()))
        told = self.run("monitoring", 1, rank.read_traces, files=files).values[0]
        rows = {name: row for name, (row, _) in told.items()}
        return rows, {name: cause for name, (_, cause) in told.items()}

    def _files(self) -> list[Path]:
        folder = self._curriculum.root / "phase4_production" / "traces"
        return sorted(folder.glob("*.json"))

    # ── checkpoints ─────────────────────────────────────────────────────────────────

    def left_out(self, n: int, *, stop: int, last: int) -> Cells:
        """Return the first step that differs without each item of the state.

        One run saves after step `stop`, with your full_state and save, and continues to
        step `last`. Another one loads that in new objects, with your load and restore,
        and also continues to step `last`.
        """
        units = {name: chosen_unit(self._curriculum, name) for name in resumed.UNITS}
        parts = json.dumps({name: as_parts(unit) for name, unit in units.items()})
        rows: dict[str, dict[str, str | int | float]] = {}
        for half, items in (
            ("bfloat16", ("", *resumed.ITEMS)),
            ("float16", (resumed.SCALER,)),
        ):
            values = {"parts": parts, "half": half, "stop": stop, "last": last}
            scenario = resumed.stopped_and_resumed
            run = self.run("fault_tolerance", n, scenario, **values, without=items)
            for item, steps in run.values[0].items():
                weights, outputs = ("never" if s is None else s for s in steps)
                rows[item or "nothing"] = {"weights": weights, "outputs": outputs}
        return rows
