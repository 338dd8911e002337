"""The same model, data and seed on each engine of the core: do the numbers agree?

Float64, SGD, 20 steps on two ranks and on three; the baseline is torch's DDP. Engines
in an environment of their own are compared by `make test-ray`.

    <engine>_loss_n2        the largest difference of a step's loss to DDP's
    <engine>_weights_n2     and of a weight after the last step
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
from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from distlab.engines import PyTorchDDPTrainer  # noqa: E402
from distlab.models.mlp import make_mlp  # noqa: E402
from distlab.runner import Cluster  # noqa: E402

STEPS, BAR = 20, 1e-10
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
    return report_of("engines", lines)


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
    return show(measure(), text, as_json="--json" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
