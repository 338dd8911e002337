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
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks import _engine_ranks as ranks  # noqa: E402
from benchmarks import _outside_engines as outside  # noqa: E402
from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from distlab.engines import PyTorchDDPTrainer  # noqa: E402
from distlab.models.mlp import make_mlp  # noqa: E402
from distlab.runner import Cluster  # noqa: E402

STEPS, BAR = 20, 1e-10
ACCURACY_BAR = 0.01
WORLDS = (2, 3)
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


def measure(worlds: tuple[int, ...] = WORLDS) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
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
    return {**report_of("engines", lines), "not_measured": absent}


def gap_lines(name: str, bar: float, gaps: outside.Gaps) -> list[Line]:
    """The rows of an engine outside the core; `name` with a place for the figure's."""
    found = {"loss": gaps.loss, "weights": gaps.weights, "accuracy": gaps.accuracy}
    most = {"loss": bar, "weights": bar, "accuracy": ACCURACY_BAR}
    bars = Bars(at_least={}, at_most={name.format(k): v for k, v in most.items()})
    more = {"baseline": "torch DDP", "steps": outside.STEPS}
    return [bars.line(name.format(k), v, "1", **more) for k, v in found.items()]


def compare(name: str, result: Any, base: Any) -> list[Line]:
    """The largest differences; a refusal raises."""
    assert not isinstance(result, str), result
    pairs = zip(result["losses"], base["losses"], strict=True)
    losses = max(abs(one - other) for one, other in pairs)
    weights = float((result["weights"] - base["weights"]).abs().max())
    bars = Bars(at_least={}, at_most={f"{name}_loss": BAR, f"{name}_weights": BAR})
    more = {"baseline": "torch DDP", "steps": len(base["losses"])}
    return [
        bars.line(f"{name}_loss", losses, "1", **more),
        bars.line(f"{name}_weights", weights, "1", **more),
    ]


def text(results: Any) -> list[str]:
    """The table."""
    return rows(
        results,
        lambda line: (
            f"{line['name']:<32} {line['value']:>9.1e}"
            + (f"  bar ≤ {line['bar']:g}" + ("" if line["met"] else "  MISSED"))
        ),
    )


def main() -> int:
    """Measure, print, and say whether every bar is met."""
    report, as_json = measure(), "--json" in sys.argv
    code = show(report, text, as_json=as_json)
    if not as_json:
        for name, target in report["not_measured"].items():
            print(f"{name} is not installed here: make {target}")
    return code


if __name__ == "__main__":
    sys.exit(main())
