"""The same model, data and seed on each engine: do the numbers agree?

SGD, 20 steps, in float64 (DeepSpeed and TensorFlow: float32); the baseline is torch's
DDP. Engines of the core run on two ranks and on three. One that has an environment to
itself runs on two, where it is installed; the others are named as not measured:

    make test-ray; .venv-ray/bin/python -m distlab bench engines

    <engine>_loss_n2        the largest difference of a step's loss to DDP's
    <engine>_weights_n2     and of a weight after the last step
    <engine>_accuracy_n2    and of the accuracy on held-out digits (not of the core's)
    single_process_*        the same for one process with the same global batches

distlab bench engines [--json]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from benchmarks._bars import Bench, Line, Report
from distlab.engines import PyTorchDDPTrainer
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster
from tests.corpora import engine_ranks as ranks
from tests.corpora import outside_engines as outside

STEPS, BAR = 20, 1e-10
ACCURACY_BAR = 0.01
WORLDS = (2, 3)
BENCH = Bench("engines", __doc__)
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2_stage_3": {"backend": "fsdp2"},
    "fsdp2_stage_2": {"backend": "fsdp2", "zero_stage": 2},
    "ddp_stage_1": {"backend": "pytorch-ddp", "zero_stage": 1},
    "scratch": {"backend": "scratch"},
}


def single_process(batch_size: int) -> dict[str, Any]:
    """The same steps without any group: plain torch in this process."""
    train, _ = ranks.loaders()
    model: nn.Module = make_mlp()
    trainer = PyTorchDDPTrainer(
        model, optimizer=ranks.sgd, verbose=False, epochs=2, batch_size=batch_size
    )
    history = trainer.fit(train, max_steps=STEPS)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": history.losses, "weights": weights}


def measure(worlds: tuple[int, ...] = WORLDS) -> Report:
    """All figures."""
    lines: list[Line] = []
    for n in worlds:
        with Cluster() as cluster:
            base, *others = [
                by_rank[0]
                for by_rank in ranks.on_ranks(
                    cluster,
                    n,
                    [{"max_steps": STEPS, **e} for e in ({}, *ENGINES.values())],
                )
            ]
        size = ranks.BATCH // n * n
        named = zip(
            ("single_process", *ENGINES), (single_process(size), *others), strict=True
        )
        for name, result in named:
            lines += compare(f"{name}_n{n}", result, base)
    for name, engine in outside.ENGINES.items():
        if engine.is_here:
            lines += gap_lines(f"{name}_{{}}_n2", engine.bar, engine.gaps())
    absent = {n: e.target for n, e in outside.ENGINES.items() if not e.is_here}
    return BENCH.report(lines, not_measured=absent)


def gap_lines(name: str, bar: float, gaps: outside.Gaps) -> list[Line]:
    """The rows of an engine outside the core; `name` with a place for the figure's."""
    most = {"loss": bar, "weights": bar, "accuracy": ACCURACY_BAR}
    return _lines({name.format(k): (vars(gaps)[k], most[k]) for k in most})


def compare(name: str, result: Any, base: Any) -> list[Line]:
    """The largest differences; a refusal raises."""
    assert not isinstance(result, str), result
    pairs = zip(result["losses"], base["losses"], strict=True)
    losses = max(abs(one - other) for one, other in pairs)
    weights = float((result["weights"] - base["weights"]).abs().max())
    return _lines({f"{name}_loss": (losses, BAR), f"{name}_weights": (weights, BAR)})


def _lines(found: dict[str, tuple[float, float]]) -> list[Line]:
    """By the name of a figure: its value, and its bar."""
    bench = Bench("engines", __doc__, at_most={k: bar for k, (_, bar) in found.items()})
    more: Line = {"baseline": "torch DDP", "steps": STEPS}
    return [bench.line(name, value, **more) for name, (value, _) in found.items()]


def absent_engines(report: Report) -> list[str]:
    """The engines that are not installed, and how to measure them."""
    absent = report["not_measured"].items()
    return [f"{name} is not installed here: make {target}" for name, target in absent]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, absent_engines))
