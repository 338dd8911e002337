"""The same random numbers on all ranks, or in all workers of a loader.

How it knows: draws of noise (dropout, randn and the like) are compared by the state of
the generator before them. If the ranks draw from the same state, on the same line, in
every training step, they draw the same numbers. For datasets, the first sample of each
worker that draws from a generator tells which state that generator had.
Silent: outside of data parallelism, before the first batch (ranks should make the same
weights), for a single number (a layer that all ranks skip or none), for shuffles and
picked indices, in evaluation, and where the inputs of the ranks are the same too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.trial import Trial, loader_of, same, training_loaders, trains


def find(trial: Trial) -> Iterator[Finding]:
    """Return one finding for the ranks' draws, and one per loader."""
    if not trial.is_data_parallel():
        return
    yield from _in_steps(trial.logs)
    for number in sorted(training_loaders(trial.logs[0])):
        yield from _in_samples(trial, number)


def _in_steps(logs: list[AuditLog]) -> Iterator[Finding]:
    draws = [_noise(log) for log in logs]
    rows = list(zip(*draws, strict=False))
    alike = [
        row
        for row in rows
        if same([event["state"] for event in row])
        and same([event.at for event in row])
        and prod(row[0]["shape"]) > 1
    ]
    if not alike or len(alike) < len(rows) / 2:
        return
    first = alike[0][0]
    seeded = [row["seeded"] for row in alike[0]]
    at = seeded[0] if seeded[0] is not None and same(seeded) else first.at
    if at is not None:
        yield Finding(
            at,
            "same-random-numbers",
            f"all {len(logs)} ranks draw the same numbers in {first['fn']} at "
            f"{first.at}, step {first.step}",
            "after the model is made, seed each rank differently: "
            "torch.manual_seed(seed + rank)",
        )


def _noise(log: AuditLog) -> list[Event]:
    """Return the draws of training steps: between a batch, or forward(), and a step."""
    found: list[Event] = []
    pending: list[Event] = []
    started = False
    for event in log.of("draw", "batch", "forward", "step", "epoch"):
        if event.kind == "forward":
            started = trains(event)
        elif event.kind == "batch":
            started, pending = True, []
        elif event.kind == "epoch":
            started = False
        elif event.kind == "draw" and started:
            pending.append(event)
        elif event.kind == "step":
            found += pending
            pending = []
    return found


def _in_samples(trial: Trial, number: int) -> Iterator[Finding]:
    first: dict[str, dict[tuple[int, int], Event]] = defaultdict(dict)
    for log in trial.logs:
        for note in log.of("fetch"):
            if note["loader"] == number and note["epoch"] == 0:
                for source in note["drawn"]:
                    who = (log.rank, -1 if note["worker"] is None else note["worker"])
                    first[source].setdefault(who, note)
    for source, notes in first.items():
        by_state: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for who, note in notes.items():
            by_state[note["drawn"][source]].append(who)
        alike = max(by_state.values(), key=len)
        if len(alike) < 2:
            continue
        made = loader_of(trial.logs[0], number)
        place: Place | None = notes[alike[0]]["made"].get(source)
        at = place or (made.at if made else None)
        if at is None:
            continue
        ranks = {rank for rank, _ in alike}
        which = "workers" if len(ranks) == 1 else "ranks"
        if 1 < len(ranks) < len(alike):
            which = "workers of all ranks"
        yield Finding(
            at,
            "same-random-numbers",
            f"{len(alike)} {which} draw the same random numbers from {source} for "
            "their samples",
            "derive each seed from the rank, and in workers from torch.initial_seed()",
        )
        return
