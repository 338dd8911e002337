"""Copies of the model that are no longer the same: at which step, in which parameter.

How it knows: the weights after each optimizer step are compared by a digest. They must
be equal on all ranks if DDP holds them, or if the script reduces their gradients, or if
a sampler deals samples out and the copies began equal.
The line is that of the cause, where one is seen: a forward() past DDP, a step without
synchronized gradients, weights that some ranks load or overwrite, unequal rates. Else
it is the line of the step.
Silent: if parameters are sharded, if the script reduces the weights themselves (local
SGD) or works under Join, and for buffers, which DDP sends in each forward().
"""

from __future__ import annotations

from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.source import with_around
from distlab.audit.trial import Trial, between_steps, same, steps

_CAUSES = ("forward", "loaded", "overwritten")


def find(trial: Trial) -> Iterator[Finding]:
    """Return the first difference."""
    logs = trial.logs
    if not trial.is_data_parallel() or trial.is_sharded() or not trial.many.is_whole:
        return
    if trial.may_differ():
        return
    by_rank = [steps(log) for log in logs]
    if not any(by_rank):
        return
    counts = [len(rank) for rank in by_rank]
    names = _replicated(logs, by_rank)
    for number, row in enumerate(zip(*by_rank, strict=False)):
        for name in names:
            prints = [event["after"].get(name) for event in row]
            if all(prints) and not same([p.digest for p in prints if p]):
                yield _finding(logs, row, number, name)
                return
    if len(set(counts)) > 1 and names:
        most = counts.index(max(counts))
        at = by_rank[most][min(counts)].at
        if at is not None:
            yield Finding(
                at,
                "replicas-differ",
                f"rank {most} takes {max(counts)} optimizer steps, but rank "
                f"{counts.index(min(counts))} takes {min(counts)}",
                "let all ranks take the same number of steps",
            )


def _replicated(logs: list[AuditLog], by_rank: list[list[Event]]) -> list[str]:
    """Return the names of parameters that should be the same on all ranks."""
    world_size = len(logs)
    names = [
        name
        for ddp in logs[0].of("ddp")
        if ddp["size"] == world_size
        for name in ddp["names"]
    ]
    reduced = {e["gradient"] for e in logs[0].of("collective") if e["gradient"]}
    names += [name for name in reduced if name not in names]
    if not names and all(by_rank):
        first = [rank[0]["weights"] for rank in by_rank]
        alike = [
            name
            for name in first[0]
            if same([w[name].digest if name in w else None for w in first])
        ]
        names = alike if len(alike) == len(first[0]) else []
    return names


def _finding(
    logs: list[AuditLog], row: tuple[Event, ...], number: int, name: str
) -> Finding:
    before = [event["weights"].get(name) for event in row]
    began_equal = all(before) and same([p.digest for p in before if p])
    at, why, advice = _cause(logs, row, number, began_equal)
    place = at or row[0].at or Place("", 0)
    where = f"after step {number}" if began_equal else f"before step {number}"
    return Finding(
        place,
        "replicas-differ",
        f"the ranks' copies differ {where}, first in {name}{why}",
        advice,
    )


Cause = tuple[Place | None, str, str]
"""The line, the rest of the sentence, and what to do."""


def _cause(
    logs: list[AuditLog], row: tuple[Event, ...], number: int, began_equal: bool
) -> Cause:
    by_rank = [between_steps(log, *_CAUSES)[number] for log in logs]
    if began_equal:
        return _of_the_step(logs, row, by_rank[0])
    for kind, said in (("loaded", "loads"), ("overwritten", "overwrites")):
        have = [[e for e in events if e.kind == kind] for events in by_rank]
        counts = [len(events) for events in have]
        if len(set(counts)) > 1:
            most = counts.index(max(counts))
            at = have[most][-1].at
            why = f": rank {most} {said} weights there, but other ranks don't"
            return at, why, "do it on all ranks, or broadcast the weights afterwards"
    overwritten = [e for e in by_rank[0] if e.kind == "overwritten"]
    if overwritten:
        why = ": the ranks overwrite weights there with different values"
        return overwritten[-1].at, why, "use the same values on all ranks"
    if number == 0:
        return (
            _seed_line(logs, row),
            ": they never had the same weights",
            "broadcast rank 0's weights, or use the same seed on all ranks when you "
            "make them",
        )
    return row[0].at, "", "look for code that changes weights between steps"


def _of_the_step(
    logs: list[AuditLog], row: tuple[Event, ...], lead: list[Event]
) -> Cause:
    forwards = [e for e in lead if e.kind == "forward" and e["grad"]]
    past = [e for e in forwards if e["inside"] is not None and e["training"]]
    if past:
        why = ": forward() bypasses DDP, so no gradients are reduced"
        return past[0].at, why, "call the DDP module itself, not .module"
    wrapped = [e for e in forwards if e["ddp"] is not None]
    if wrapped and not wrapped[-1]["syncs"]:
        why = ": the last backward() before the step is in no_sync()"
        at = wrapped[-1].at
        at = (at and with_around(at, "no_sync")) or at
        return at, why, "run the last micro-batch of each step outside no_sync()"
    if not same([event["lr"] for event in row]):
        made = next(iter(logs[0].of("optimizer")), None)
        at = made.at if made else row[0].at
        return at, ": their learning rates differ", "use the same rate on all ranks"
    if not list(logs[0].of("ddp")) and not _reduces(logs[0]):
        why = ": nothing reduces their gradients"
        return row[0].at, why, "wrap the model in DistributedDataParallel"
    return row[0].at, "", "look for code that changes weights or gradients on one rank"


def _reduces(log: AuditLog) -> bool:
    return any(event["gradient"] for event in log.of("collective"))


def _seed_line(logs: list[AuditLog], row: tuple[Event, ...]) -> Place | None:
    """Return where the ranks seeded unlike, else where the model was made."""
    seeds = [[e for e in log.of("seed") if e["which"] == "torch"] for log in logs]
    if all(seeds) and not same([events[0]["value"] for events in seeds]):
        return seeds[0][0].at
    born = [place for place in row[0]["born"].values() if place is not None]
    return born[0] if born else row[0].at
