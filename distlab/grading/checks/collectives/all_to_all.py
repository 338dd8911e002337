"""Checks of task 1.18: all_to_all by its values, its messages and its rounds.

The first number of a chunk says whose it is: 312 begins rank 1's chunk number 2. The
3 depends on the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.collectives.gather_scatter_mistakes import (
    BEFORE,
    Guess,
    Outputs,
    judge,
)
from distlab.grading.clause import clause
from distlab.grading.kit.any_tensor import (
    emptied,
    expect_each,
    finished_with_each,
    with_each,
)
from distlab.grading.kit.messages import calls_of_each, numbers
from distlab.grading.kit.rounds import alternating, num_rounds
from distlab.grading.runs import Runs, RunSpec, in_rounds, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import ranks_in_words

SIZE = 3  # numbers in a chunk
CHUNK_BYTES = SIZE * 8
ANY_WORLD = 3  # where other dtypes are looked at
ANY_SHAPES = tuple((size * ANY_WORLD,) for size in (1, 2, 3))
MANY = 40  # simulated ranks
MANY_AFTER = 8  # real ranks: the largest number that is tried with processes
WHERE = "what is sent to rank dst is input.chunk(n)[dst]; what comes from rank src is "
WHERE += "written to output.chunk(n)[src]"

# ── what runs in the ranks ──────────────────────────────────────────────────────────


def exchange_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One all_to_all."""
    n, device = context.world_size, context.comm.device
    given = marked(seed, context.rank, n).to(device)
    output = torch.full_like(given, BEFORE)
    before = given.clone()
    returned = unit.all_to_all(context.comm, output, given)
    return {"before": before, "input": given, "output": output, "returned": returned}


def exchange_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Chunks of one, two and three numbers of other dtypes; in output there is nan."""

    def call(given: Tensor) -> Tensor:
        output = emptied(torch.zeros_like(given))
        unit.all_to_all(context.comm, output, given)
        return output

    return with_each(context, seed, call, ANY_SHAPES)


def exchange_alternating(context: RankContext, unit: ModuleType, seed: int) -> None:
    """The same in virtual time, where the ranks take turns in starting messages."""
    with alternating(context) as comm:
        given = marked(seed, comm.rank, comm.world_size)
        unit.all_to_all(comm, torch.empty_like(given), given)


def marked(seed: int, rank: int, num_chunks: int) -> Tensor:
    """Random numbers in chunks, whose first number says whose chunk it is."""
    values = numbers(seed, rank, num_chunks * SIZE)
    mark = 100 * (1 + seed % 9) + 10 * rank
    values[::SIZE] = mark + torch.arange(num_chunks)
    return values


def _exchanges(world_size: int) -> list[RunSpec]:
    also = [on_ranks(exchange_any)] if world_size == ANY_WORLD else []
    return [on_ranks(exchange_once), *also]


# ── C1 values ───────────────────────────────────────────────────────────────────────


class Exchanged(Outputs):
    """The same bits are expected, in n chunks on each side."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.size = SIZE

    def same(self, value: object, other: Tensor) -> bool:
        """Whether two tensors are the same, bit for bit."""
        return isinstance(value, Tensor) and torch.equal(value, other)


@clause("collectives.all_to_all", "C1", worlds=(3, 2, 4, 7, 5, 1, 8), runs=_exchanges)
def chunks_of_all_ranks(runs: Runs) -> str | None:
    """Chunk p of rank r's output is chunk r of rank p's input."""
    run = runs.finished(exchange_once)
    seen = Exchanged(run)
    changed = [r for r, v in enumerate(run.values) if _input_changed(v)]
    if changed:
        raise NotYetError(
            f"all_to_all changed the caller's input on {ranks_in_words(changed)}, "
            "expected it unchanged",
            slug="input-changed",
            evidence=calls_of_each(run),
            rule="do not modify input: receive into a chunk of output",
        )
    judge(seen, _exchanged(seen.inputs), "all_to_all", _misplaced)
    if runs.world_size == ANY_WORLD:
        run = finished_with_each(runs, exchange_any, ANY_SHAPES)
        expect_each(run, _exchanged, "all_to_all's output")
    return None


def _exchanged(inputs: Sequence[Tensor]) -> list[Tensor]:
    cut = [given.chunk(len(inputs)) for given in inputs]
    return [torch.cat([own[rank] for own in cut]) for rank in range(len(inputs))]


def _input_changed(value: dict[str, Any]) -> bool:
    return not torch.equal(value["input"], value["before"])


def _misplaced(seen: Outputs, expected: Sequence[Tensor]) -> Guess:
    """What is wrong with the outputs: always something, as bits are compared."""
    n, ranks = seen.n, range(seen.n)
    holds = [_whose(seen, output) for output in seen.outputs]
    wanted = [[(p, r) for p in ranks] for r in ranks]
    kept = [[None if p == r else (p, r) for p in ranks] for r in ranks]
    if holds == kept:
        return Guess(
            "own-chunk-missing",
            "each rank's output has the others' chunks, but its own chunk is "
            "unchanged, expected its own input chunk there",
            "copy chunk number rank of input to chunk number rank of output",
        )
    odd = next(r for r in ranks if holds[r] != wanted[r])
    if all({*holds[r]} == {*wanted[r]} for r in ranks):
        order = ", ".join(str(held[0]) for held in holds[odd] if held)
        sentence = (
            f"rank {odd}'s output has the chunks of ranks {order} in this order, "
            "expected the order of the ranks"
        )
        return Guess("wrong-chunk-order", sentence, WHERE)
    p = next(p for p in ranks if holds[odd][p] != (p, odd))
    place, held = f"chunk {p} of rank {odd}'s output is", holds[odd][p]
    right = f"expected rank {p}'s chunk {odd}"
    if held is None:
        is_old = bool((seen.outputs[odd].chunk(n)[p] == BEFORE).all())
        what = "unchanged" if is_old else "no chunk of any input"
        return Guess("", f"with {n} ranks, {place} {what}, {right}", "")
    return Guess("", f"{place} rank {held[0]}'s chunk {held[1]}, {right}", WHERE)


def _whose(seen: Outputs, output: Tensor) -> list[tuple[int, int] | None]:
    """For each chunk of an output, of which rank it is which chunk."""
    chunks = {
        (rank, number): chunk
        for rank, given in enumerate(seen.inputs)
        for number, chunk in enumerate(given.chunk(seen.n))
    }
    return [
        next((at for at, chunk in chunks.items() if seen.same(got, chunk)), None)
        for got in output.chunk(seen.n)
    ]


# ── C2 messages ─────────────────────────────────────────────────────────────────────


@clause("collectives.all_to_all", "C2", worlds=(3, 2, 4, 7, 1), runs=_exchanges)
def a_message_for_each_rank(runs: Runs) -> str | None:
    """Every rank sends n - 1 messages, and in them n - 1 chunks."""
    n = runs.world_size
    run = runs.finished(exchange_once)
    for record in run.ranks:
        sent = record.messages
        told = f"with {n} ranks, rank {record.rank} sent"
        if sent != n - 1:
            raise NotYetError(
                f"{told} {sent} message{'s' * (sent != 1)}, expected {n - 1}: one to "
                "each other rank",
                slug="extra-messages" if sent > n - 1 else "",
                evidence=calls_of_each(run),
                rule="each other rank gets one message with its chunk",
            )
        if record.sent_bytes != (n - 1) * CHUNK_BYTES:
            raise NotYetError(
                f"{told} {record.sent_bytes:.0f} bytes in its messages, expected "
                f"{(n - 1) * CHUNK_BYTES}: one chunk of {CHUNK_BYTES} bytes to each "
                "other rank",
                evidence=calls_of_each(run),
                rule="each other rank gets one message with its chunk",
            )
    return None


# ── C3 rounds ───────────────────────────────────────────────────────────────────────


def _in_rounds(world_size: int) -> list[RunSpec]:
    many = [MANY] if world_size == MANY_AFTER else []
    return [
        in_rounds(exchange_alternating, n, CHUNK_BYTES) for n in (world_size, *many)
    ]


@clause(
    "collectives.all_to_all",
    "C3",
    worlds=(4, 3, 7, 8),
    runs=[on_ranks(exchange_once)],
    later=_in_rounds,
)
def in_few_rounds(runs: Runs) -> str | None:
    """The n - 1 rounds in virtual time that each rank's own messages need."""
    run = runs.finished(exchange_once)
    if any(record.messages != runs.world_size - 1 for record in run.ranks):
        raise NotJudgedError("not one message for each other rank: see C2")
    for spec in _in_rounds(runs.world_size):
        assert spec.network is not None
        n = spec.network.world_size
        needed = num_rounds(runs, spec)
        if needed > n - 1:
            is_recorded = n == runs.world_size
            raise NotYetError(
                f"with {n} ranks, the messages take {needed} rounds{_hot_spot(run)}, "
                f"expected {n - 1} rounds",
                slug="too-many-rounds",
                evidence=_orders(run) if is_recorded else (),
                rule="in round k send to (rank + k) % n and receive from "
                "(rank - k) % n, at the same time",
            )
    return f"n = {MANY}, simulated: {MANY - 1} rounds; to rank 0 first: {2 * MANY - 3}"


def _sends(run: Run) -> list[list[int]]:
    """To which ranks each rank sends, in its order."""
    calls = (record.calls() for record in run.ranks)
    return [
        [call["dst"] for call in own if call.get("dst") is not None] for own in calls
    ]


def _hot_spot(run: Run) -> str:
    firsts = [own[0] for own in _sends(run) if own]
    is_hot = {*firsts[1:]} == {0}
    return " because all others send to rank 0 first" if is_hot else ""


def _orders(run: Run) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, "finished", f"sends to {', '.join(map(str, own))}")
        for rank, own in enumerate(_sends(run))
    )
