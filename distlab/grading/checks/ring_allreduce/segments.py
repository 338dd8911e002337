"""Checks of 3.5: the same sums, no tensor in flight is touched, and the time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from distlab.grading.checks.ring_allreduce.mistakes import Sums, expect_sums
from distlab.grading.checks.ring_allreduce.plans import share_in_words
from distlab.grading.checks.ring_allreduce.steps import (
    SENDING,
    expect_few_bytes,
    expect_one_neighbor,
)
from distlab.grading.checks.ring_allreduce.sums import (
    EMPTY,
    HAS_INF_AND_NAN,
    LENGTH,
    NOT_FINITE,
    TWO_ON_THREE,
    WITH_INF,
    WORLDS,
    values_of,
)
from distlab.grading.checks.ring_allreduce.watched import (
    EXPECTED,
    READ_EARLY,
    WatchedComm,
)
from distlab.grading.clause import clause
from distlab.grading.kit.lent import expect_own_memory, lend
from distlab.grading.kit.messages import calls_of_each
from distlab.grading.runs import Runs, RunSpec, in_virtual_time, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

SEGMENT_BYTES = 16  # two elements
PER_CHUNK = 8  # segments, for the clock
RANKS, WIRE_S, ADD_S = 3, 1.0, 0.75  # of one segment
MOST = 1.2  # times what the messages alone take; without overlap it is 1.375 times


def pipelined_once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    kind: str = "uneven",
    length: int = LENGTH,
    segment_bytes: int = SEGMENT_BYTES,
) -> dict[str, Any]:
    """One pipelined_all_reduce."""
    memory = values_of(kind, seed, context.rank, length + 2).to(context.comm.device)
    lent = lend(memory[1:-1], memory)
    started_s = context.comm.time()
    unit.pipelined_all_reduce(context.comm, lent.tensor, segment_bytes)
    took_s = context.comm.time() - started_s
    return {**lent.left(), "returned": None, "took_s": took_s}


def watched_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The same through a communicator that looks after what is under way."""
    comm = WatchedComm(context.comm, unit)
    tensor = values_of("uneven", seed, context.rank, 4 * context.world_size)
    unit.pipelined_all_reduce(comm, tensor, SEGMENT_BYTES)
    if not comm.sins and bool(tensor.isnan().any()):
        comm.sin(READ_EARLY)  # never used again: the line is unknown
    return {"sins": comm.sins[:1]}


def _sums(world_size: int) -> list[RunSpec]:
    plays: list[RunSpec] = [
        on_ranks(pipelined_once),
        on_ranks(pipelined_once, kind="digits"),
    ]
    if world_size in (2, 3):
        one = on_ranks(pipelined_once, segment_bytes=1 << 20)
        plays += [one.when("with one segment per chunk")]
    if world_size == 3:
        plays += [on_ranks(pipelined_once, length=2).when(TWO_ON_THREE)]
        plays += [on_ranks(pipelined_once, length=0).when(EMPTY)]
        plays += [on_ranks(pipelined_once, kind=NOT_FINITE, length=24).when(WITH_INF)]
    return plays


@clause("ring_allreduce.segments", "C1", worlds=WORLDS, runs=_sums)
def sum_everywhere(runs: Runs) -> str | None:
    """As all_reduce, with several segments and with one."""
    for spec in _sums(runs.world_size):
        run = runs.finished(spec)
        digits = runs.ended(pipelined_once, kind="digits")
        counts = Sums(digits) if digits.outcome == "finished" else None
        expect_own_memory(run, run.values, "pipelined_all_reduce")
        try:
            values = dict(spec.values)
            aside = HAS_INF_AND_NAN * (values.get("kind") == NOT_FINITE)
            aside += " (2 elements)" * (values.get("length") == 2)
            expect_sums(Sums(run), "pipelined_all_reduce", counts, aside)
        except NotYetError as failure:
            if not failure.slug and _sins(runs.ended(watched_once)):
                raise NotJudgedError("a tensor in flight is touched: see C2") from None
            raise
    return None


def _sins(run: Run) -> list[tuple[int, str, int]]:
    """What each rank did first to a tensor under way, and in which line."""
    if run.outcome != "finished":
        return []
    return [
        (rank, *value["sins"][0])
        for rank, value in enumerate(run.values)
        if value["sins"]
    ]


@clause(
    "ring_allreduce.segments", "C2", worlds=(3, 2, 4), runs=[on_ranks(watched_once)]
)
def left_alone(runs: Runs) -> str | None:
    """Between isend or irecv and its wait, the tensor is not touched."""
    run = runs.finished(watched_once)
    found = _sins(run)
    lines = tuple(
        Evidence(rank, "touched", f"line {line}: {what}")
        for rank, what, line in found
        if line
    )
    if found:
        rank, what, line = found[0]
        raise NotYetError(
            f"rank {rank} {what}"
            + f" (line {line})" * bool(line)
            + f", expected {EXPECTED[what]}",
            slug="touched-in-flight",
            evidence=lines,
            rule="wait for the message first, or use another tensor meanwhile",
        )
    return None


@clause(
    "ring_allreduce.segments", "C3", worlds=(3, 2, 4), runs=[on_ranks(pipelined_once)]
)
def no_more_bytes(runs: Runs) -> str | None:
    """The bytes of the ring, none of it longer than a segment."""
    run = runs.finished(pipelined_once)
    expect_few_bytes(run, LENGTH, 8, halves=2)
    expect_one_neighbor(run)
    for record in run.ranks:
        sends = [call for call in record.calls() if call["op"] in SENDING]
        longest = max((call["bytes"] for call in sends), default=0)
        if longest > SEGMENT_BYTES:
            raise NotYetError(
                f"with segment_bytes={SEGMENT_BYTES}, rank {record.rank} sent a "
                f"message of {longest} bytes, expected at most {SEGMENT_BYTES}",
                slug="segment-too-long",
                evidence=calls_of_each(run),
                rule="round the number of segments up, not down",
            )
    return None


WITH_ADDITIONS = in_virtual_time(
    pipelined_once,
    RANKS,
    bytes_per_s=SEGMENT_BYTES / WIRE_S,
    added_bytes_per_s=SEGMENT_BYTES / ADD_S,
    length=RANKS * PER_CHUNK * SEGMENT_BYTES // 8,
)


@clause(
    "ring_allreduce.segments",
    "C4",
    worlds=(RANKS,),
    runs=[on_ranks(pipelined_once)],
    later=[WITH_ADDITIONS],
)
def additions_hide(runs: Runs) -> str | None:
    """With additions that take time, not much longer than the messages alone."""
    runs.finished(pipelined_once)  # a hang shows there, and is named
    told = runs.simulated(WITH_ADDITIONS)
    sums = [value["after"] for value in told["values"]]
    if any(not value.equal(sums[0]) for value in sums):
        raise NotJudgedError("the ranks' sums differ: see C1")
    alone_s = 2 * (RANKS - 1) * PER_CHUNK * WIRE_S
    adding_s = (RANKS - 1) * PER_CHUNK * ADD_S
    took_s = max(value["took_s"] for value in told["values"])
    if took_s > MOST * alone_s:
        hidden = max(0.0, 1 - (took_s - alone_s) / adding_s)
        raise NotYetError(
            f"on {RANKS} simulated ranks, pipelined_all_reduce took {took_s:.3g} s, "
            f"expected at most {MOST * alone_s:.3g} s: {share_in_words(hidden)} of the "
            "additions overlap with messages",
            slug="no-overlap" if hidden < 0.25 else "",
            rule="the next irecv and the last isend must be in flight while you add",
        )
    return (
        f"{RANKS} simulated ranks, {PER_CHUNK} segments: {took_s:.4g} s; the messages "
        f"alone {alone_s:.4g}, the additions {adding_s:.4g}"
    )
