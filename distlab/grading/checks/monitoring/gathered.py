"""C4 of 4.1, `monitoring.step_report`: all records, from one collective."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import COLLECTIVES
from distlab.grading.checks.monitoring.recorded import Row, drawn_row, same
from distlab.grading.clause import clause
from distlab.grading.kit.apart import apart
from distlab.grading.kit.uneven import left_early, run_or_name
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 1)
READING = ("item", "__float__", "__int__", "__index__")
STEPS = 2
_CHECKSUM = Row._fields.index("checksum")
READS = 2  # .item() and the like; reading every number so takes 8 for each rank


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Within it, each number of a tensor that is made Python's adds to the list."""
    reads: list[str] = []
    before = {name: getattr(Tensor, name) for name in READING}

    def noted(name: str) -> Callable[..., Any]:
        def method(tensor: Tensor) -> Any:
            reads.append(name)
            return before[name](tensor)

        return method

    try:
        for name in READING:
            setattr(Tensor, name, noted(name))
        yield reads
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)


def row_of(seed: int, rank: int, step: int = 0) -> Row:
    """What this rank recorded: its number is another one; rank 1 has no samples."""
    draw = random.Random(seed * 7919 + step * 101 + rank)
    row = drawn_row(draw, 20 - 3 * rank, 0 if rank == 1 else 3 + rank)
    return row._replace(num_nonfinite=rank * 1_000_003, checksum=2**32 - 5 - rank)


def gather(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """What gather_records returns in each step, and how the first was read."""
    told, reads = [], 0
    for step in range(STEPS):
        record = unit.Record(*row_of(seed, context.rank, step))
        with counted_reads() as read:
            told.append(unit.gather_records(context.comm, record))
        reads = reads or len(read)
    return {"rows": [read_records(each) for each in told], "reads": reads}


def read_records(told: Any) -> list[list[float]] | str:
    """Records as rows of numbers, or what is wrong with them."""
    if told is None:
        return "returned None: is a return missing?"
    try:
        rows = [[float(number) for number in record] for record in told]
    except (TypeError, ValueError):
        return f"returned {told!r:.60}, not a list of records"
    fields = len(Row._fields)
    short = [row for row in rows if len(row) != fields]
    if short:
        return f"returned a record of {len(short[0])} numbers; a Record has {fields}"
    return rows


@clause("monitoring.step_report", "C4", worlds=WORLDS, runs=[on_ranks(gather)])
def all_records_everywhere(runs: Runs) -> str | None:
    """Equal numbers on every rank; one call; read at once."""
    without = [1] if runs.world_size > 1 else []

    def name(run: Run) -> NotYetError | None:
        return left_early(run, without, "has no samples")

    run = run_or_name(runs, gather, name)
    n = runs.world_size
    expected = [
        [row_of(runs.seed, rank, step) for rank in range(n)] for step in range(STEPS)
    ]
    for rank, value in enumerate(run.values):
        _expect_rows(rank, value["rows"][0], expected[0])
    _expect_one_call(run)
    for rank, value in enumerate(run.values):
        _expect_no_totals(rank, value["rows"][1], *expected)
        _expect_rows(rank, value["rows"][1], expected[1])
    for rank, value in enumerate(run.values):
        if value["reads"] > READS:
            raise NotYetError(
                f"in gather_records, rank {rank} read {value['reads']} numbers of "
                "tensors one by one, expected all of them at once",
                slug="item-per-number",
                rule="read the gathered tensor once: gathered.tolist()",
            )
    return None


def _expect_rows(rank: int, rows: list[list[float]] | str, right: list[Row]) -> None:
    if isinstance(rows, str):
        raise NotYetError(f"rank {rank}: gather_records {rows}")
    n = len(right)
    if len(rows) != n:
        records = "1 record" if len(rows) == 1 else f"{len(rows)} records"
        raise NotYetError(
            f"with {n} ranks, gather_records returned {records} on rank {rank}, "
            f"expected {n}",
            evidence=_beside(rows, right),
        )
    wrong = [
        (row, field)
        for row in range(n)
        for field in range(len(Row._fields))
        if not same(rows[row][field], right[row][field], 1e-15)
    ]
    if not wrong:
        return
    row, field = wrong[0]
    single = [float(torch.tensor(x, dtype=torch.float32)) for x in right[row]]
    is_single = all(map(same, rows[row], single))
    is_sorted = rows == sorted(rows) and all(map(_same_row, rows, sorted(right)))
    if is_single and (row, _CHECKSUM) in wrong:
        field = _CHECKSUM  # the rows show it
    found, expected = rows[row][field], right[row][field]
    slug = rule = ""
    name = Row._fields[field]
    pair = _exactly(found, expected)
    words = (
        f"gather_records on rank {rank} returned {name} = {pair[0]} in record {row}, "
        f"expected {pair[1]}"
    )
    if is_single:
        words += ": it rounded the numbers to float32"
        slug, rule = "wrong-dtype", "make the tensor with dtype=torch.float64"
    elif is_sorted:
        words = (
            f"gather_records on rank {rank} sorted the records by record.rank, "
            "expected the order of the ranks that sent them"
        )
        rule = "leave them as the collective has put them: by comm.rank"
    raise NotYetError(
        words,
        slug=slug,
        evidence=_beside(rows, right),
        rule=rule,
    )


def _exactly(found: float, expected: float) -> tuple[str, str]:
    """Both as whole numbers, or with as many digits as tell them apart."""
    if float(found).is_integer() and float(expected).is_integer():
        return f"{found:.0f}", f"{expected:.0f}"
    return apart(found, expected)


def _same_row(row: Sequence[float], right: Sequence[float]) -> bool:
    return all(same(x, y, 1e-15) for x, y in zip(row, right, strict=True))


def _expect_no_totals(
    rank: int, rows: list[list[float]] | str, before: list[Row], right: list[Row]
) -> None:
    """In the second step nothing of the first is left, once or from every rank."""
    if isinstance(rows, str) or len(rows) != len(right):
        return
    samples = Row._fields.index("num_samples")
    own, old, new = ([r[samples] for r in each] for each in (rows, before, right))
    for times in {len(right), 1}:
        if any(old) and own == [x + times * y for x, y in zip(new, old, strict=True)]:
            often = f" {times} times, once per rank" * (times > 1)
            raise NotYetError(
                f"in the second step, the result on rank {rank} contains the first "
                f"step's num_samples{often or ' too'}, expected the second step's only",
                slug="totals-reduced-again",
                evidence=_beside(rows, right),
                rule="send what belongs to this step; add up the results, locally",
            )


def _beside(rows: list[list[float]], right: list[Row]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            place,
            "record",
            f"rank {row[0]:.0f}  loss {row[4]:.4g}  samples {row[5]:.0f}  "
            f"checksum {row[7]:.10g}",
        )
        for place, row in enumerate(rows[: len(right)])
    )


def _expect_one_call(run: Run) -> None:
    for record in run.ranks:
        calls = [call["op"] for call in record.calls()]
        if len(calls) == STEPS and {*calls} <= COLLECTIVES:
            continue
        if not calls and run.world_size == 1:
            continue
        more = len(calls) > STEPS
        names = ", ".join(dict.fromkeys(calls))
        raise NotYetError(
            f"in {STEPS} steps, rank {record.rank} made {len(calls)} calls of {names}, "
            "expected one collective per step"
            if calls
            else f"in {STEPS} steps, rank {record.rank} called no collective, expected "
            "one per step",
            slug="call-per-number" if more and set(calls) <= COLLECTIVES else "",
            rule="put all numbers of the record into one tensor" if more else "",
        )
