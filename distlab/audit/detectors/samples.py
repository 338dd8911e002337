"""Samples that are repeated, lost or padded over an epoch of training.

How it knows: the hooks on the DataLoader give each sample of each complete pass, on all
ranks. A sample is known by its index where a distributed sampler deals indices out, and
otherwise by its content, because a rank that slices the data itself counts from 0.
What one rank reads in the run with one rank is the whole set. Without a loader, the
inputs of the model's forward() on all ranks are compared.
Silent: if no data parallelism is in sight (then copies may be meant), for evaluation
(each rank may well read everything), for samplers with replacement, where content is
random, for passes that were broken off, and for a tail that `drop_last` leaves out.
Padding to equal shares is a note: it is what DistributedSampler does by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.trial import (
    Epoch,
    Trial,
    epochs,
    loader_of,
    same,
    training_loaders,
    trains,
)

_SEVERAL = 2  # steps with equal inputs before that counts


def find(trial: Trial) -> Iterator[Finding]:
    """Return a finding per loader, or one for the inputs of forward()."""
    if not trial.is_data_parallel():
        return
    logs = trial.pair.logs
    loaders = training_loaders(logs[0])
    for number in sorted(loaders):
        made = loader_of(logs[0], number)
        if made is not None and made.at is not None:
            yield from _of_loader(trial, number, made)
    if not loaders:
        yield from _of_inputs(logs)


def _of_loader(trial: Trial, number: int, made: Event) -> Iterator[Finding]:
    if made["replacement"] or made["weighted"]:
        return
    passes = [epochs(log, number) for log in trial.pair.logs]
    alone = epochs(trial.one.logs[0], number) if trial.one else []
    lost: list[set[object]] = []
    total = 0
    for index, ranks in enumerate(zip(*passes, strict=False)):
        read = _samples(ranks, made)
        if not all(epoch.is_whole for epoch in ranks) or read is None:
            continue
        repeated = _repeated(read, made, index, trial.world_size)
        if repeated is not None:
            yield repeated
            return
        whole = _whole_set(alone, ranks, made, index)
        if whole is not None:
            lost.append(whole.difference(*read))
            total = len(whole)
    missing = set.intersection(*lost) if lost else set()
    if made.at is not None and missing and not _is_tail(made, lost):
        yield Finding(
            made.at,
            "samples-lost",
            f"{len(missing)} of {total} samples are never read by any rank",
            "give every sample to some rank, or use DistributedSampler",
        )


def _repeated(
    read: list[list[object]], made: Event, index: int, world_size: int
) -> Finding | None:
    counts = Counter(sample for part in read for sample in part)
    repeated = [sample for sample, count in counts.items() if count > 1]
    extra = sum(counts.values()) - len(counts)
    if not repeated or made.at is None:
        return None
    if _is_padding(made, extra, world_size):
        return Finding(
            made.at,
            "samples-padded",
            f"epoch {index} reads {extra} of {len(counts)} samples twice, so that all "
            "ranks have the same number",
        )
    by_all = set.intersection(*map(set, read))
    times = f"on all {len(read)} ranks" if len(by_all) == len(counts) else "repeatedly"
    return Finding(
        made.at,
        "samples-repeated",
        f"epoch {index} reads {len(repeated)} of {len(counts)} samples {times}",
        "give each rank its own samples: DataLoader(…, sampler=DistributedSampler(…))",
    )


def _is_tail(made: Event, lost: list[set[object]]) -> bool:
    """Return True for what drop_last leaves out, which the script asks for."""
    if not (made["drop_last"] or (made["distributed"] and not made["padded"])):
        return False
    shuffles = made["shuffle"] or made["random"]
    return len(lost) < 2 or not shuffles


def _is_padding(made: Event, extra: int, world_size: int) -> bool:
    return bool(made["distributed"] and made["padded"] and extra < world_size)


def _samples(ranks: Sequence[Epoch], made: Event) -> list[list[object]] | None:
    """Return what identifies the samples of each rank, None if nothing does."""
    if made["distributed"]:
        if any(epoch.indices is None for epoch in ranks):
            return None
        return [list(epoch.indices or ()) for epoch in ranks]
    if any(epoch.draws or not epoch.content for epoch in ranks):
        return None
    for epoch in ranks:
        known = epoch.indices
        if known is not None and len(set(epoch.content)) < len(set(known)):
            return None  # samples with the same content
    return [list(epoch.content) for epoch in ranks]


def _whole_set(
    alone: Sequence[Epoch], ranks: Sequence[Epoch], made: Event, index: int
) -> set[object] | None:
    if made["distributed"] and ranks[0].length is not None:
        # A split for validation is the same on all ranks, a share of a rank is not.
        parts = [epoch.part or range(epoch.length or 0) for epoch in ranks]
        return {sample for part in parts for sample in part}
    if index < len(alone) and alone[index].is_whole and not alone[index].draws:
        return set(alone[index].content)
    return None


def _of_inputs(logs: Sequence[AuditLog]) -> Iterator[Finding]:
    calls = [[e for e in log.of("forward") if _trains(e)] for log in logs]
    rows = list(zip(*calls, strict=False))
    alike = [row for row in rows if same([event["inputs"] for event in row])]
    if len(alike) < _SEVERAL or len(alike) < len(rows):
        return
    if same([row[0]["inputs"] for row in alike]):
        return  # one batch over and over: a toy that measures something
    at = _pick_before(logs[0], alike[0][0]) or alike[0][0].at
    if at is not None:
        yield Finding(
            at,
            "samples-repeated",
            f"all {len(logs)} ranks train on the same batch in each of {len(alike)} "
            "steps",
            "let each rank pick its own samples, by a seed or a slice that depends on "
            "the rank",
        )


def _trains(event: Event) -> bool:
    return trains(event) and bool(event["has_parameters"])


def _pick_before(log: AuditLog, forward: Event) -> Place | None:
    place = None
    for event in log.events:
        if event is forward:
            return place
        if event.kind == "pick":
            place = event.at
    return place
