"""An evaluation that counts samples which the sampler repeated to make shares equal.

How it knows: a loader that no optimizer step followed was passed over by a distributed
sampler whose share is padded. Then a few numbers were reduced; or the ranks gathered
results and made tensors as long as the padded set of them, and none as long as the set.
Silent: if one of the reduced numbers is the true number of samples (then the padding
was left out), if all of them are what one rank gets alone, if gathered results leave
torch (nobody sees what becomes of a list), or if nothing was reduced or gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.trial import Trial, epochs, training_loaders

_REDUCING = frozenset({"all_reduce", "reduce"})
_GATHERING = frozenset(
    (
        *("all_gather", "gather", "all_gather_object", "gather_object"),
        *("all_gather_into_tensor",),
    )
)


def find(trial: Trial) -> Iterator[Finding]:
    """Return a finding per evaluation."""
    logs = trial.pair.logs
    training = training_loaders(logs[0])
    for made in logs[0].of("loader"):
        number, replicas = made["number"], made["replicas"]
        if number in training or not made["distributed"] or replicas < 2:
            continue
        passes = [epochs(log, number) for log in logs]
        if not all(p and p[0].is_whole and p[0].length for p in passes):
            continue
        length = passes[0][0].length or 0
        read = sum(len(p[0].indices or ()) for p in passes)
        if read <= length:
            continue
        at = _counted_at(trial, number, length, read)
        if at is not None:
            yield Finding(
                at,
                "padded-evaluation",
                f"the ranks evaluated {read} samples, although there are only "
                f"{length}, because the sampler made at {made.at} repeats "
                f"{read - length}",
                "leave out the repeated samples, and divide by the true number of "
                "samples",
            )


def _counted_at(trial: Trial, number: int, length: int, read: int) -> Place | None:
    """Return the line that takes the repeated samples in, None if none does."""
    logs = trial.pair.logs
    gathered = [_gathered_after(log, number) for log in logs]
    if all(gathered):
        event = gathered[0]
        kept = [
            e for log in logs for e in log.of("long") if e["length"] in (length, read)
        ]
        whole = {e["length"] for e in kept}
        left = any(e["fn"] in ("tolist", "numpy") for e in kept)
        return event.at if event and whole == {read} and not left else None
    following = [_reduced_after(log, number) for log in logs]
    if not all(following) or _is_right(trial, following, number, length):
        return None
    return following[0][0].at


def _after(log: AuditLog, number: int) -> list[Event]:
    """Return the collectives between the first pass over a loader and the next pass."""
    found: list[Event] = []
    inside = False
    for event in log.of("epoch", "epoch_end", "collective", "step"):
        if event.kind == "epoch" and event["loader"] == number and not inside:
            inside = True
        elif event.kind in ("epoch", "step") and inside and found:
            break
        elif event.kind == "collective" and inside:
            found.append(event)
    return found


def _reduced_after(log: AuditLog, number: int) -> list[Event]:
    after = _after(log, number)
    return [e for e in after if e["op"] in _REDUCING and e["values"]]


def _gathered_after(log: AuditLog, number: int) -> Event | None:
    after = _after(log, number)
    return next((e for e in after if e["op"] in _GATHERING), None)


def _is_right(
    trial: Trial, following: list[list[Event]], number: int, length: int
) -> bool:
    sums = [
        [sum(column) for column in zip(*(e["values"] for e in row), strict=False)]
        for row in zip(*following, strict=False)
    ]
    if any(math.isclose(value, length) for row in sums for value in row):
        return True
    if trial.one is None:
        return False
    alone = _reduced_after(trial.one.logs[0], number)
    if not alone or len(alone) != len(sums):
        return False
    means = [event["reduce"] == "AVG" for event in following[0]]
    return all(
        math.isclose(value / (trial.world_size if mean else 1), own, rel_tol=1e-6)
        for row, event, mean in zip(sums, alone, means, strict=True)
        for value, own in zip(row, event["values"], strict=False)
    )
