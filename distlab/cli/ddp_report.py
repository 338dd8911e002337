"""Word the report of `distlab ddp`, before and after training, and as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from distlab.cli.screen import command, processes, show, wrapped
from distlab.cli.training import duration, kilobytes, table, times
from distlab.cost import SECONDS_AN_HOUR
from distlab.training.ddp import Beside, DdpResult
from distlab.training.ddp_code import is_reference
from distlab.training.ddp_config import DdpConfig
from distlab.training.ddp_estimate import Estimate
from distlab.training.ddp_tracking import Tracked

_MOST_EPOCHS = 12  # rows of the table

CONCEPTS = (
    ("each rank read only its own samples", "not-sharded"),
    ("all ranks shared the same shuffle", "own-shuffle-per-rank"),
    ("all ranks started from rank 0's weights", "unequal-start"),
    ("every step used the mean gradient", "sum-not-mean"),
    ("the ranks' weights stayed equal", "own-gradient-only"),
    ("the accuracy counts all ranks' samples", "local-metrics"),
)
"""Facts that a run demonstrates, each with its name for `distlab explain`."""


def plan(config: DdpConfig, note: str, expected: Estimate, rate: float) -> list[str]:
    """Say what will happen, how long it will take and what it will cost."""
    count = config.world_size
    share = "" if count == 1 else f", {config.samples_per_rank} on each rank"
    took = _about(expected.seconds)
    sure = "about" if expected.messages_s is not None else "at least"
    momentum = f", momentum {config.momentum:g}" if config.momentum else ""
    epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs} epochs"
    both = wrapped(f"code      {', '.join(config.code)}", "  ", " " * 10)
    return [
        *wrapped(f"data      {config.dataset}: {note}", "  ", " " * 10),
        *(both if len(config.code) > 1 else []),
        f"  training  {processes(count)} on {config.device} ({config.backend}), "
        f"{epochs}, {expected.num_steps:,} steps",
        f"  batch     {config.step_size} samples a step{share}",
        *_left_out(config),
        f"  step      {config.optimizer}, learning rate {config.learning_rate:.4g}"
        f"{momentum}",
        f"  time      {sure} {took}: {duration(expected.start_s)} to start, then "
        f"{expected.num_steps:,} steps of",
        f"            {_step(expected)}",
        f"  cost      {sure} {_money(expected.cost(rate))}: {count} × {took}",
        f"            at {_rate(rate)}",
    ]


def _step(expected: Estimate) -> str:
    own = duration(expected.step_s)
    if expected.messages_s is None:
        return f"{own} for the step itself, plus its messages"
    messages = duration(expected.messages_s)
    return f"{own} for the step itself and {messages} for its messages"


def _left_out(config: DdpConfig) -> list[str]:
    if config.global_batch_size % config.world_size == 0:
        return []
    return [
        f"            of {config.global_batch_size}, because fit gives each rank the "
        "same number and leaves out the rest"
    ]


def tell(
    result: DdpResult,
    alone: DdpResult | None,
    beside: Beside | None,
    tracked: Tracked | None,
    rate: float,
    failures: Sequence[str],
) -> None:
    """Return the whole report for the terminal."""
    lines = ["", *_epoch_table(result), "", *_figures(result, rate)]
    if alone and beside:
        lines += ["", *_side_by_side(result, alone, beside)]
    show([("plain", line) for line in lines])
    for sentence in failures:
        show([("fail", line) for line in wrapped(sentence, "  ")])
    if not failures:
        show([("plain", line) for line in ["", *_concepts(result)]])
        if not is_reference(result.config.code):
            own = _own(result.config.code)
            show([("", ""), ("pass", f"  ◆ The ranks ran your own {own}.")])
    if tracked:
        show([("plain", line) for line in ["", *_tracked(tracked)]])


def _own(code: tuple[str, ...]) -> str:
    """Return `code`, or task numbers if the other tasks are the reference's."""
    numbers = [part.removeprefix("mine ") for part in code if part[:5] == "mine "]
    return numbers[0] if numbers else "code"


def _epoch_table(result: DdpResult) -> list[str]:
    lines = [
        f"  {'epoch':<8}{'training loss':<16}{'held-out loss':<16}{'accuracy':<11}"
        f"{'time':<10}samples a second"
    ]
    for number, row in enumerate(result.epochs, start=1):
        lines.append(
            f"  {number:<8}{row.train_loss:<16.4f}{row.loss:<16.4f}"
            f"{row.accuracy:<11.4f}{duration(row.seconds):<10}{row.throughput:,.0f}"
        )
    if len(lines) > _MOST_EPOCHS + 1:
        lines = [*lines[:_MOST_EPOCHS], "  …", lines[-1]]
    return lines


def _figures(result: DdpResult, rate: float) -> list[str]:
    config, count = result.config, result.config.world_size
    trained = sum(row.seconds for row in result.epochs)
    hours = result.seconds / SECONDS_AN_HOUR
    same = len(set(result.digests)) == 1
    weights = result.digests[0] if same else ", ".join(result.digests[:8])
    if same and count > 1:
        weights += f" on all {count} ranks: the same bits"
    lines = [
        f"  accuracy    {result.accuracy:.4f} on held-out samples",
        f"  duration    {duration(result.seconds)}, {duration(trained)} of it in "
        f"{result.num_steps:,} steps",
        f"  cost        {_money(result.cost(rate))} = {count} × {hours:.5f} h",
        f"              at {_rate(rate)}",
        f"  throughput  {result.throughput:,.0f} samples a second, all ranks together",
        *wrapped(f"weights     {weights}", "  ", " " * 12),
        f"  data        the ranks spent {100 * result.data_wait:.0f} % of their time "
        "waiting for it",
    ]
    if config.world_size > 1:
        lines.append(
            f"  messages    took {100 * result.communication:.0f} % of the ranks' "
            f"time; each rank sent {kilobytes(result.step_bytes)} per step"
        )
    return lines


def _side_by_side(result: DdpResult, alone: DdpResult, beside: Beside) -> list[str]:
    label = processes(result.config.world_size).replace("processes", "ranks")
    rows = [("1 process", alone, None), (label, result, beside.difference)]
    lines = [*table(rows), "", *_pace(beside)]
    return lines if beside.failures() else [*lines, *_rounding(result, beside)]


def _pace(beside: Beside) -> list[str]:
    if beside.speedup >= 1.05:
        return [f"  The ranks were {times(beside.speedup)} as fast as one process."]
    if beside.speedup > 0.95:
        return ["  The ranks were about as fast as one process."]
    return [
        f"  The ranks took {times(1 / beside.speedup)} as long as one process, because "
        "on one machine",
        "  they share the cores and also send messages. More ranks pay off when each",
        "  has cores of its own.",
    ]


def _rounding(result: DdpResult, beside: Beside) -> list[str]:
    differ = [
        "  The weights differ from the single process's weights by at most "
        f"{beside.first_difference:.1e}",
        f"  after the first step, and by at most {beside.difference:.1e} at the end.",
    ]
    if beside.tolerance is None:
        return [
            *differ,
            f"  {result.config.optimizer} divides each gradient by its own size. Where "
            "a gradient is nearly",
            "  zero, rounding can reverse the step, so we can't conclude anything from",
            "  this difference.",
        ]
    digits = "16" if result.weights[0].element_size() > 4 else "7"
    return [
        *differ,
        "  This is rounding error. Splitting a batch changes the order of the",
        f"  additions, and numbers have only {digits} digits. In the first step, up to",
        f"  {beside.tolerance:.0e} is normal, and the error grows with every step.",
    ]


def _concepts(result: DdpResult) -> list[str]:
    if result.config.world_size == 1:
        return [
            "  One process has no other ranks to agree with. To see ranks agree, run: "
            f"{command('ddp -n 2')}"
        ]
    rows = [f"    {seen:<44}{slug}" for seen, slug in CONCEPTS]
    return [
        "  You have just seen all of these at work. To learn what goes wrong when one",
        f"  is missing, type {command('explain NAME')}.",
        *rows,
    ]


def _tracked(tracked: Tracked) -> list[str]:
    return [
        f"  MLflow logged it: experiment {tracked.experiment}, run {tracked.run_id}",
        f"  mlflow ui --backend-store-uri {shlex.quote(tracked.uri)}",
    ]


def _about(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def _rate(rate: float) -> str:
    return f"{rate:.2f} per worker and hour (--cost-per-worker-hour)"


def _money(amount: float) -> str:
    return f"{amount:.4f}" if amount < 1 else f"{amount:,.2f}"


def as_data(
    result: DdpResult,
    alone: DdpResult | None,
    beside: Beside | None,
    tracked: Tracked | None,
    rate: float,
    failures: Sequence[str],
) -> dict[str, Any]:
    """Return everything for `--json`; nan and infinity become null."""
    data = {
        **asdict(result.config),
        "backend": result.config.backend,
        "accuracy": result.accuracy,
        "accuracies": list(result.accuracies),
        "digests": list(result.digests),
        "seconds": result.seconds,
        "cost": result.cost(rate),
        "cost_per_worker_hour": rate,
        "throughput": result.throughput,
        "communication": result.communication,
        "data_wait": result.data_wait,
        "step_bytes": result.step_bytes,
        "num_steps": result.num_steps,
        "epoch_rows": [asdict(row) for row in result.epochs],
        "shards": [asdict(shard) for shard in result.shards],
        "alone": _alone_data(alone, rate) if alone else None,
        "compare": asdict(beside) if beside else None,
        "concepts": [slug for _, slug in CONCEPTS],
        "mlflow": asdict(tracked) if tracked else None,
        "failures": list(failures),
        "exit": 1 if failures else 0,
    }
    cleaned = _finite(data)
    assert isinstance(cleaned, dict)
    return cleaned


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _alone_data(alone: DdpResult, rate: float) -> dict[str, Any]:
    return {
        "accuracy": alone.accuracy,
        "digest": alone.digests[0],
        "seconds": alone.seconds,
        "epoch_s": alone.epoch_s,
        "cost": alone.cost(rate),
    }
