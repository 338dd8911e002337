"""Means of unequal numbers of elements, averaged as if they were equal.

How it knows, for training: the autograd graph of each backward() says how much one
element of the loss weighs. Within a step, all elements of all micro-batches and of all
ranks must weigh the same, because gradients are averaged over ranks. Where counts are
unequal and weights with them, short batches count too much.
For figures that are reduced over ranks: a rank that contributes the sum or the mean of
its batches' means, or its own mean, although batches or shares have unequal sizes.
Silent: if all counts are equal, if the loss is a sum, weighted by a tensor, or has a
form that the graph doesn't show, and for figures that match none of these means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.trial import Trial, by_backward, loss_line

_NEAR = 1e-5


def find(trial: Trial) -> Iterator[Finding]:
    """Return one finding for the training loss, and one per reduced figure."""
    logs = trial.pair.logs
    yield from _in_training(trial, logs)
    yield from _in_figures(logs)


# ── the training loss ───────────────────────────────────────────────────────────────


def _in_training(trial: Trial, logs: list[AuditLog]) -> Iterator[Finding]:
    is_parallel = trial.is_data_parallel()
    by_rank = [by_backward(log) for log in logs]
    for number, step in enumerate(zip(*by_rank, strict=False)):
        for rank, backwards in enumerate(step):
            unequal = _unequal(backwards)
            if unequal is not None and len(backwards) > 1:
                few, many, ratio = unequal
                at = loss_line(backwards[0])
                if at is not None:
                    yield Finding(
                        at,
                        "token-weights",
                        f"in step {number}, rank {rank} adds up the losses of "
                        f"micro-batches with {few} and {many} targets, but an element "
                        f"of the smaller one has {ratio:.3g} times the weight",
                        "sum the losses, and divide by the number of targets in the "
                        "whole step",
                    )
                return
        if is_parallel:
            unequal = _unequal([event for rank in step for event in rank])
            if unequal is not None:
                few, many, ratio = unequal
                at = loss_line(step[0][0])
                if at is not None:
                    yield Finding(
                        at,
                        "mean-of-means",
                        f"in step {number}, the ranks average the losses of batches "
                        f"with {few} and {many} elements, but an element of the "
                        f"smaller one has {ratio:.3g} times the weight",
                        "sum the loss, multiply it by the number of ranks, and divide "
                        "by the number of elements on all ranks",
                    )
                return


def _unequal(backwards: list[Event]) -> tuple[int, int, float] | None:
    """Return the smallest and largest count, and how unequal elements weigh."""
    terms = [event["terms"] for event in backwards]
    if not terms or not all(terms) or len({len(t) for t in terms}) != 1:
        return None
    for column in zip(*terms, strict=True):
        counted = [(weight, count) for weight, count in column if count > 0]
        if len(counted) < 2 or len({count for _, count in counted}) == 1:
            continue
        weights = [abs(weight) for weight, _ in counted]
        if min(weights) > 0 and max(weights) / min(weights) > 1 + _NEAR:
            counts = [int(count) for _, count in counted]
            return min(counts), max(counts), max(weights) / min(weights)
    return None


# ── figures that are reduced ────────────────────────────────────────────────────────


def _in_figures(logs: list[AuditLog]) -> Iterator[Finding]:
    reduced = [list(_figures(log)) for log in logs]
    told: set[Place] = set()
    for row in zip(*reduced, strict=False):
        events = [event for event, _, _ in row]
        at = events[0].at
        if at is None or at in told or any(event.at != at for event in events):
            continue
        losses = [values for _, values, _ in row]
        shares = [share for _, _, share in row]
        said = _wrong_loss(events, losses) or _wrong_share(events, shares)
        if said:
            told.add(at)
            yield Finding(
                at,
                "mean-of-means",
                said,
                "reduce the sum and the number of samples, then divide",
            )


def _figures(log: AuditLog) -> Iterator[tuple[Event, list[tuple[float, float]], int]]:
    """Return each small reduction with the losses and rows since a loader began."""
    losses: list[tuple[float, float]] = []
    rows = 0
    for event in log.of("epoch", "loss", "batch", "collective"):
        if event.kind == "epoch":
            losses, rows = [], 0
        elif event.kind == "batch":
            rows += event["rows"]
        elif event.kind == "loss" and event["reduction"] == "mean":
            losses.append((event["value"], event["count"]))
        elif event.kind == "collective" and _is_figure(event):
            yield event, list(losses), rows


def _is_figure(event: Event) -> bool:
    reduces = event["op"] in ("all_reduce", "reduce")
    return bool(reduces and event["values"] and not event["gradient"])


def _wrong_loss(events: list[Event], losses: list[list[tuple[float, float]]]) -> str:
    counts = [count for rank in losses for _, count in rank]
    if not counts or any(math.isnan(count) for count in counts) or not all(losses):
        return ""
    if len(set(counts)) == 1 and len({len(rank) for rank in losses}) == 1:
        return ""
    n = len(events)
    for position in range(len(events[0]["values"])):
        values = [event["values"][position] for event in events]
        for name, means in _means(losses).items():
            for scale in (1.0, 1.0 / n):
                if all(
                    math.isclose(value, mean * scale, rel_tol=_NEAR) and value
                    for value, mean in zip(values, means, strict=True)
                ):
                    return (
                        f"the ranks reduce {name}, but the batches have "
                        f"{min(counts):g} to {max(counts):g} elements"
                    )
    return ""


def _means(losses: list[list[tuple[float, float]]]) -> dict[str, list[float]]:
    sums = [sum(value for value, _ in rank) for rank in losses]
    means = [total / len(rank) for total, rank in zip(sums, losses, strict=True)]
    found = {}
    sizes = [[count for _, count in rank] for rank in losses]
    if len({count for rank in sizes for count in rank}) > 1:
        found["the sum of their batches' mean losses"] = sums
        found["the mean of their batches' mean losses"] = means
    if len({sum(rank) for rank in sizes}) > 1:
        found["their own mean loss"] = [
            sum(v * c for v, c in rank) / max(1.0, sum(c for _, c in rank))
            for rank in losses
        ]
        found["the mean of their batches' mean losses"] = means
    return found


def _wrong_share(events: list[Event], shares: list[int]) -> str:
    """Say so if each rank gives a share of its own samples, as an accuracy is."""
    if len(set(shares)) == 1 or not all(shares):
        return ""
    n = len(events)
    for position in range(len(events[0]["values"])):
        values = [event["values"][position] for event in events]
        for scale in (1, n):
            counts = [v * scale * rows for v, rows in zip(values, shares, strict=True)]
            is_share = all(
                0 <= v * scale <= 1 and abs(c - round(c)) < 1e-3
                for v, c in zip(values, counts, strict=True)
            )
            if is_share and any(
                abs(v * scale - round(v * scale)) > 1e-6 for v in values
            ):
                return (
                    f"the ranks average fractions of {min(shares)} to {max(shares)} "
                    "samples as if all ranks had the same number"
                )
    return ""
