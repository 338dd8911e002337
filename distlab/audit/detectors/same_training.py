"""n ranks against one rank, in float64: where their weights first part.

How it knows: both runs start from the same weights, take the same samples in every step
at the same rate, and no random numbers, no batch norm of one rank's own come in. Then
n ranks must do what one does, up to rounding. The gradients of the first step that
differs say how: n times as large is a sum that should have been a mean.
Silent: if any of that doesn't hold, because the difference has another reason then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.fingerprints import Print
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.trial import (
    Trial,
    between_steps,
    loader_of,
    loss_line,
    steps,
    training_loaders,
    trains,
)


def find(trial: Trial) -> Iterator[Finding]:
    """Return the first difference."""
    if trial.one is None or trial.is_sharded():
        return
    if not trial.is_data_parallel() or trial.may_differ():
        return
    many, one = trial.pair.logs, trial.one.logs
    if not _comparable(many, one):
        return
    for number, (there, here) in enumerate(
        zip(steps(many[0]), steps(one[0]), strict=False)
    ):
        if there["lr"] != here["lr"]:
            return
        name = _first_difference(there["after"], here["after"], trial.tolerance)
        if name is None:
            continue
        if _first_difference(there["weights"], here["weights"], trial.tolerance):
            return
        ratio = _ratio(there["gradients"], here["gradients"])
        at, why, advice = _cause(trial, many[0], there, ratio)
        if at is not None:
            yield Finding(
                at,
                "not-the-same-training",
                f"{trial.world_size} ranks train differently from one, first at step "
                f"{number} in {name}{why}",
                advice,
            )
        return


def _first_difference(
    there: dict[str, Print], here: dict[str, Print], tolerance: float
) -> str | None:
    for name, own in here.items():
        other = there.get(name)
        if other is not None and not own.is_near(other, tolerance):
            return name
    return None


def _ratio(
    there: dict[str, Print | None], here: dict[str, Print | None]
) -> float | None:
    """Return by how much all gradients are larger, None if not by the same factor."""
    ratios = []
    for name, own in here.items():
        other = there.get(name)
        if own is None or other is None or own.norm < 1e-12:
            continue
        ratios.append(other.norm / own.norm)
    if ratios and max(ratios) - min(ratios) <= 1e-4 * max(ratios):
        return ratios[0]
    return None


def _cause(
    trial: Trial, log: AuditLog, step: Event, ratio: float | None
) -> tuple[Place | None, str, str]:
    n = trial.world_size
    reduced = [e for e in log.of("collective") if e["gradient"] and e.at]
    if ratio is not None and not math.isclose(ratio, 1.0, rel_tol=1e-4):
        times = f"{ratio:.4g} times as large"
        if reduced and math.isclose(ratio, n, rel_tol=1e-3):
            return (
                reduced[0].at,
                f": the gradients are {times}, because they're summed and not averaged",
                "divide the gradients by the number of ranks",
            )
        backward = next(iter(log.of("backward")), None)
        return (
            loss_line(backward) if backward else step.at,
            f": the gradients are {times}",
            "DDP averages gradients, so let each rank take the mean over its samples",
        )
    return step.at, "", "look for code that depends on the rank or on its own samples"


def _comparable(many: list[AuditLog], one: list[AuditLog]) -> bool:
    logs = [*many, *one]
    if any(_is_noisy(log) or _has_local_norms(log) for log in logs):
        return False
    if training_loaders(many[0]):
        return _same_samples(many, one)
    rows = [sum(_rows(log, at) for log in many) for at in range(3)]
    return rows == [_rows(one[0], at) for at in range(3)] and any(rows)


def _rows(log: AuditLog, number: int) -> int:
    events = between_steps(log, "forward")
    if number >= len(events):
        return 0
    return sum(e["rows"] for e in events[number] if trains(e))


def _is_noisy(log: AuditLog) -> bool:
    if any(event["drawn"] for event in log.of("fetch")):
        return True
    started = False
    for event in log.of("batch", "forward", "draw"):
        if event.kind == "draw" and started:
            return True
        started = started or event.kind != "draw"
    return False


def _has_local_norms(log: AuditLog) -> bool:
    return any(event["local_norms"] for event in log.of("forward"))


def _same_samples(many: list[AuditLog], one: list[AuditLog]) -> bool:
    """Return True if each step takes the same samples in both runs."""
    number = min(training_loaders(many[0]))
    made = loader_of(many[0], number)
    if made is None:
        return False
    name = "indices" if made["distributed"] else "content"
    there = [_by_step(log, number, name) for log in many]
    here = _by_step(one[0], number, name)
    if not here or any(not rank for rank in there):
        return False
    for at, own in enumerate(here):
        parts = [rank[at] if at < len(rank) else [] for rank in there]
        together = sorted(str(sample) for part in parts for sample in part)
        if together != sorted(map(str, own)):
            return at > 0 and at >= len(here) - 1
    return True


def _by_step(log: AuditLog, number: int, name: str) -> list[list[object]]:
    found = []
    for events in between_steps(log, "batch", "fetch"):
        samples: list[object] = []
        kind = "batch" if name == "indices" else "fetch"
        for event in events:
            if event.kind == kind and event["loader"] == number:
                samples += event[name] or []
        found.append(samples)
    return found
