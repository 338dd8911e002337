"""Collectives that only some ranks call, and calls that don't fit together.

How it knows: the simulator proves that ranks wait for calls that never come, or that
ranks bring unlike tensors. The ranks' logs of calls, forward() and backward() are laid
beside each other, and the first place where they part is the candidate. Of the lines
that ranks are on there, the finding names the one under an `if` that asks for the rank
(that is read from the source); else the one that the other ranks never reach; else the
one that fewer ranks are on. If all of these calls were made before, some ranks are a
step ahead, and the finding names the call that they left out. A call made while a state
is collected is `save-needs-all`.
`new_group` must be called by all ranks, so it is reported without a hang too.
Silent: if the run came to its end and no group was made by a part of the ranks, because
ranks may well call the same collective on different lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from distlab.audit import source
from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.play import Trouble
from distlab.audit.trial import Trial, same, some_ranks

_STATE = ("state_dict", "full_tensor", "dcp.save", "checkpoint", "consolidate", "save(")

Call = tuple[str, Place | None]
Calls = list[tuple[Call, Event]]


def find(trial: Trial) -> Iterator[Finding]:
    """Return at most one finding."""
    many = trial.many
    if many.outcome == "deadlock":
        yield from _stuck(trial)
    elif many.outcome == "raised":
        yield from _unlike(trial)
    elif many.is_whole:
        yield from _partial_groups(trial)


def _calls(log: AuditLog) -> Calls:
    """Return what other ranks have to answer, in order."""
    found = []
    for event in log.of("collective", "forward", "backward"):
        if event.kind == "collective" and event["collective"]:
            found.append(((event["op"], event.at), event))
        elif event.kind == "forward" and event["ddp"] is not None:
            found.append((("forward", event.at), event))
        elif event.kind == "backward":
            found.append((("backward", event.at), event))
    return found


def _stuck(trial: Trial) -> Iterator[Finding]:
    logs, n = trial.logs, trial.world_size
    sequences = [_calls(log) for log in logs]
    stuck = {t.rank: t for t in trial.many.troubles}
    rows = zip_longest(*([call for call, _ in calls] for calls in sequences))
    parted = next((index for index, row in enumerate(rows) if not same(row)), None)
    places: dict[int, tuple[str, Place] | None] = {}
    for rank in range(n):
        place = None
        if parted is not None and parted < len(sequences[rank]):
            op, at = sequences[rank][parted][0]
            place = (op, at) if at is not None else None
        elif rank in stuck:
            waits = stuck[rank].at
            place = ("a collective", waits) if waits is not None else None
        places[rank] = place
    candidates = Counter(place for place in places.values() if place is not None)
    if not candidates:
        return
    before = {call for call, _ in sequences[0][: parted or 0]}
    chosen = _skipped(candidates, before) or _chosen(candidates, sequences)
    op, at = chosen
    ranks = [rank for rank, place in places.items() if place == chosen]
    saving = _is_saving(at, sequences, ranks, parted)
    others = [rank for rank in range(n) if rank not in ranks]
    yield Finding(
        at,
        "save-needs-all" if saving else "rank-condition",
        f"only {some_ranks(ranks, n)} of {n} called {op} on this line"
        + _elsewhere(places, others, n, stuck)
        + f". The run ended in a deadlock: {trial.many.explanation}",
        "let all ranks collect the state, and one of them write it"
        if saving
        else "let all ranks make the call, or none of them",
    )


def _skipped(
    candidates: Counter[tuple[str, Place]], before: set[Call]
) -> tuple[str, Place] | None:
    """Return the call that few ranks left out, if all candidates are known calls.

    Then nobody makes a call of his own: some are one step ahead in the same loop.
    """
    if len(candidates) < 2 or not before.issuperset(candidates):
        return None
    if any(source.is_under_rank_condition(place) for _, place in candidates):
        return None
    return candidates.most_common(1)[0][0]


def _chosen(
    candidates: Counter[tuple[str, Place]], sequences: Sequence[Calls]
) -> tuple[str, Place]:
    def order(item: tuple[tuple[str, Place], int]) -> tuple[bool, int, int]:
        (_, place), count = item
        reached = sum(any(at == place for (_, at), _ in calls) for calls in sequences)
        return not source.is_under_rank_condition(place), reached, count

    return min(candidates.items(), key=order)[0]


def _elsewhere(
    places: dict[int, tuple[str, Place] | None],
    others: list[int],
    n: int,
    stuck: dict[int, Trouble],
) -> str:
    if not others:
        return ""
    rank = others[0]
    place = places[rank]
    if place is not None:
        return f", but {some_ranks(others, n)} called {place[0]} at {place[1]}"
    state = "was waiting elsewhere" if rank in stuck else "had finished"
    return f", but rank {rank} {state}"


def _is_saving(
    at: Place, sequences: Sequence[Calls], ranks: list[int], parted: int | None
) -> bool:
    if parted is not None:
        for rank in ranks:
            calls = sequences[rank]
            if parted < len(calls) and calls[parted][1].facts.get("saving"):
                return True
    text = source.line(at)
    return any(word in text for word in _STATE)


def _unlike(trial: Trial) -> Iterator[Finding]:
    first = next((t for t in trial.many.troubles if t.kind == "ValueError"), None)
    if first is None or first.at is None or " called " not in first.said:
        return
    yield Finding(
        first.at,
        "rank-condition",
        f"the ranks' calls don't match: {first.said}",
        "let all ranks make the same call on tensors of the same shape and dtype",
    )


def _partial_groups(trial: Trial) -> Iterator[Finding]:
    made = [
        [e for e in log.of("collective") if e["op"] == "new_group" and not e["local"]]
        for log in trial.logs
    ]
    for row in zip_longest(*made):
        members = [tuple(event["members"]) if event else None for event in row]
        if same(members):
            continue
        places = [event.at for event in row if event is not None and event.at]
        if places:
            under = [at for at in places if source.is_under_rank_condition(at)]
            ranks = [r for r, event in enumerate(row) if event is not None]
            yield Finding(
                min(under or places),
                "rank-condition",
                f"the ranks don't create the same groups: on this line, "
                f"{some_ranks(ranks, len(row))} of {len(row)} called new_group for "
                f"{' or '.join(sorted({str(list(m)) for m in members if m}))}",
                "call new_group for every group on all ranks, even on ranks that "
                "aren't members",
            )
        return
