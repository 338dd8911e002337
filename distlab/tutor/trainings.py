"""Run real training for an assistant: on n processes, and beside a single one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distlab.tutor.concepts import read_concepts

if TYPE_CHECKING:  # torch is imported only when something trains
    from distlab.training.ddp import DdpResult
    from distlab.training.ddp_config import DdpConfig

SEEN = (
    "rank",
    "distributed-sampler",
    "broadcast",
    "gradient-averaging",
    "replica",
    "distributed-evaluation",
)
"""The concepts that any data-parallel run illustrates."""

MOST_EPOCHS = 50  # an assistant's mistake should not keep the machine busy for hours


def run_ddp_simulation(
    world_size: int = 2, epochs: int = 1, batch_size: int = 32, lr: float = 0.2
) -> dict[str, Any]:
    """Train a small network on real digits, on `world_size` real processes.

    `batch_size` is per rank. Returns status, message, metrics and concepts. The status
    is "finished", or "failed" if the ranks disagree or did not finish.

    Raises:
        ValueError: a number is impossible, so no process was started.
    """
    config = _config(world_size, epochs, batch_size, lr)
    from distlab.ranks import new_cluster
    from distlab.runner import RunnerError
    from distlab.training.ddp import train
    from distlab.training.ddp_code import choose_units

    try:
        with new_cluster() as cluster:
            result = train(cluster, config, None, choose_units(("reference",)))
    except RunnerError as error:
        return _outcome("failed", str(error), {})
    failures = result.failures()
    message = "; ".join(failures) or (
        f"{world_size} ranks trained one model: their weights are equal, bit for bit"
    )
    return _outcome("failed" if failures else "finished", message, _metrics(result))


def compare_ddp_vs_single(
    world_size: int = 2, epochs: int = 1, batch_size: int = 32, lr: float = 0.2
) -> dict[str, Any]:
    """Train twice, on `world_size` processes and on one, with equal global batches.

    Returns status and message, the metrics of both runs as ddp and single, the speedup,
    which is below 1 if one process was faster, the largest difference between any two
    weights, and two texts, when_to_use and why_a_laptop.

    Raises:
        ValueError: a number is impossible, so no process was started.
    """
    config = _config(world_size, epochs, batch_size, lr)
    from distlab.ranks import new_cluster
    from distlab.runner import RunnerError
    from distlab.training.ddp import compare, train, train_alone
    from distlab.training.ddp_code import choose_units

    units = choose_units(("reference",))
    try:
        with new_cluster() as cluster:
            ranks = train(cluster, config, None, units)
            single = train_alone(cluster, config, None, units)
    except RunnerError as error:
        return _outcome("failed", str(error), {})
    beside = compare(ranks, single)
    failures = [*ranks.failures(), *beside.failures()]
    concepts = read_concepts()
    message = "; ".join(failures) or "both runs trained the same model, up to rounding"
    return {
        "status": "failed" if failures else "finished",
        "message": message,
        "ddp": _metrics(ranks),
        "single": _metrics(single),
        "speedup": round(beside.speedup, 3),
        "largest_difference_of_weights": beside.difference,
        "when_to_use": concepts["ddp-or-one-process"].text,
        "why_a_laptop": concepts["laptop-speed"].text,
        "concepts": [*SEEN, "ddp-or-one-process", "laptop-speed"],
    }


def _config(world_size: int, epochs: int, batch_size: int, lr: float) -> DdpConfig:
    from distlab.training.ddp_config import Wishes, make_config

    if epochs > MOST_EPOCHS:
        raise ValueError(f"{epochs} epochs are too many; choose at most {MOST_EPOCHS}")
    wishes = Wishes(
        world_size=world_size,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=lr,
        device="cpu",
    )
    config = make_config(wishes, num_gpus=0)
    return replace(config, code=("reference",))


def _outcome(status: str, message: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "metrics": metrics,
        "concepts": list(SEEN),
    }


def _metrics(result: DdpResult) -> dict[str, Any]:
    """Return the metrics of a run in JSON's types, with None for nan and inf."""
    figures = {
        "world_size": result.config.world_size,
        "global_batch_size": result.config.step_size,
        "num_steps": result.num_steps,
        "accuracy": result.accuracy,
        "train_losses": [row.train_loss for row in result.epochs],
        "losses": [row.loss for row in result.epochs],
        "seconds": round(result.seconds, 3),
        "epoch_s": round(result.epoch_s, 4),
        "throughput": round(result.throughput, 1),
        "communication_share": round(result.communication, 4),
        "bytes_per_step_and_rank": result.step_bytes,
        "weight_digests": list(result.digests),
    }
    return {name: _finite(value) for name, value in figures.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
