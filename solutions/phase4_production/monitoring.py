"""Monitoring: record each rank's steps, and find out what the records say together.

Guide: phase4_production/guide/monitoring.md.
Source: Z. Jiang et al., MegaScale (NSDI 2024), section 5, for per-rank records and
stragglers; T. Wu et al., FALCON (arXiv 2410.12588), section 3, for slow ranks.
Symbols: n = the number of ranks. A step has three parts: data, compute, communication.
Cost: one all_gather of 8 numbers per rank and step.

    rank 0   data ██ compute █████ communication ░░░░░░░   waits for rank 1
    rank 1   data ██ compute ███████████ communication ░   the slow one
    rank 2   data █ compute ██████ communication ░░░░░░░   waits for rank 1

A rank records each step in a Record: rank, data_s, compute_s, communication_s,
loss, num_samples, num_nonfinite, checksum. Shares of a step: data, compute,
communication. A StepReport: shares, a dict by rank; loss; samples_per_s.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.given.monitoring import (
    PARTS,
    Record,
    Shares,
    Span,
    StepReport,
    Suspects,
    pack,
    read_spans,
    unpack,
)

LATE = 1.5  # times as long as the others: then a rank is late

# ── what a rank measures ────────────────────────────────────────────────────────────


def now_s() -> float:
    """Read a clock in seconds; only the difference of two calls has a meaning.

    C1 The clock never goes backward, even when the machine's time of day is corrected,
       and it keeps running while this process waits. If a step measures a part several
       times, the seconds add up. An error in the measured block reaches the caller.
    Check: distlab check 4.1
    In torch.distributed: its timeouts count on such a clock; CUDA events for a GPU
    """
    ### BEGIN SOLUTION monitoring.step_report
    #| which clocks of the module time can go back, or stop while a process waits?
    return time.perf_counter()
    ### END SOLUTION


class StepTimer:
    """Times the parts of a step; put `with timer.measure("compute"):` around each."""

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the block's seconds to those of `part`.

        You may measure a part several times in a step, and its seconds add up. If the
        block raises, its seconds may count or not.
        Example: data 0.5 s, data 0.25 s → data 0.75 s. Check: distlab check 4.1
        """
        ### BEGIN SOLUTION monitoring.step_report
        #| what runs before the block, and what after it? `yield` is the block
        start_s = self.clock()
        yield
        self.seconds[part] += self.clock() - start_s
        ### END SOLUTION

    def reset(self) -> None:
        """Begin a step."""
        self.seconds = dict.fromkeys(PARTS, 0.0)


# ── what the ranks know together ────────────────────────────────────────────────────


def step_report(records: Sequence[Record]) -> StepReport:
    """Summarize a step from the records of its ranks.

    Given: at least one record; they come in any order, and ranks may be missing. Each
    rank's three parts take more than 0 s together. A rank may have no samples.

    C2 For each rank, `shares` says what fraction of its step time went to each part.
    C3 `loss` is the mean over the samples of all ranks. It is nan only if a rank that
       has samples reports nan, or if no rank has samples. `samples_per_s` is the number
       of samples on all ranks, divided by the slowest rank's step time.
    In torch.distributed: nothing; torchmetrics has such means. Check: distlab check 4.1
    Example: losses 2, 5 and nan of 3, 1 and 0 samples → loss 2.75
    """
    ### BEGIN SOLUTION monitoring.step_report
    #| which ranks have a loss that counts, and how much does it count?
    shares, seconds = {}, []
    for record in records:
        parts = record[1:4]
        seconds.append(sum(parts))
        shares[record.rank] = Shares(*(part / sum(parts) for part in parts))
    samples = sum(record.num_samples for record in records)
    total = sum(r.loss * r.num_samples for r in records if r.num_samples)
    loss = total / samples if samples else float("nan")
    return StepReport(shares, loss, samples / max(seconds))
    ### END SOLUTION


def gather_records(comm: Comm, record: Record) -> list[Record]:
    """Gather all ranks' records on every rank, in the order of comm.rank; collective.

    Given: pack, unpack. `record.rank` need not be comm.rank.

    C4 Every rank gets an exact copy of every record, in a single collective call. The
       result is read in one go, because on a GPU each .item() would wait for the
       device.
    In torch.distributed: dist.all_gather_into_tensor(output, input)
    Cost: one all_gather of 8 float64. Check: distlab check 4.1
    """
    ### BEGIN SOLUTION monitoring.step_report
    #| one tensor, one call. which dtype holds a checksum of 32 bits exactly?
    own = torch.tensor(pack(record), dtype=torch.float64, device=comm.device)
    gathered = own.new_empty(comm.world_size * len(own))
    comm.all_gather(gathered, own)
    return [unpack(row) for row in gathered.view(comm.world_size, -1).tolist()]
    ### END SOLUTION


# ── which rank it is ────────────────────────────────────────────────────────────────


def suspects(steps: Sequence[Sequence[Record]]) -> Suspects:
    """Run all three on steps in order, each with a record of each rank in any order."""
    return Suspects(stragglers(steps), desynchronized(steps[-1]), nan_origin(steps))


def stragglers(steps: Sequence[Sequence[Record]]) -> list[int]:
    """Find the ranks for which the others wait again and again, in ascending order.

    A rank is late in a step if its own time is more than LATE times the median of the
    other ranks' own times: the time in which it doesn't wait for them. You decide which
    parts of a Record that is. A rank on its own is never late.

    C1 A rank is a straggler if it is late in more than half of the steps.
    Check: distlab check 4.2
    In torch.distributed: nothing; FlightRecorder shows who came last to a collective
    Example: own times 1, 1, 4 in each of 3 steps → [2]; in 1 of 3 steps → []
    """
    ### BEGIN SOLUTION monitoring.suspects
    #| whose communication is short: the one who is waited for, or those who wait?
    #| one long step of one rank is no straggler yet
    times_late: dict[int, int] = {}
    for records in steps:
        own = {r.rank: r.data_s + r.compute_s for r in records}
        for rank, own_s in own.items():
            others = [own[other] for other in own if other != rank]
            is_late = bool(others) and own_s > LATE * statistics.median(others)
            times_late[rank] = times_late.get(rank, 0) + is_late
    return sorted(rank for rank, num in times_late.items() if 2 * num > len(steps))
    ### END SOLUTION


def desynchronized(records: Sequence[Record]) -> list[int]:
    """Find the ranks whose weights differ from the others', in ascending order.

    C2 A rank is desynchronized if its checksum differs from the one that more than half
       of the ranks share. If no checksum is shared by more than half, all ranks are
       desynchronized.
    Example: checksums 7, 5, 7 → [1]; checksums 7, 5 → [0, 1]
    Check: distlab check 4.2
    """
    ### BEGIN SOLUTION monitoring.suspects
    #| which checksum is the right one? it need not be rank 0's
    checksums = [record.checksum for record in records]
    common = max(checksums, key=checksums.count)
    if 2 * checksums.count(common) <= len(records):
        return sorted(record.rank for record in records)
    return sorted(record.rank for record in records if record.checksum != common)
    ### END SOLUTION


def nan_origin(steps: Sequence[Sequence[Record]]) -> list[int]:
    """Find the ranks whose own gradients first had an inf or nan, in ascending order.

    C3 `nan_origin` returns the ranks that had an inf or nan before any other rank could
       have passed it on to them, because the sum spreads it to everyone's weights. If
       no rank ever had one, the list is empty.
    Example: step 1: 0 0 0, step 2: 0 4 0, step 3: 9 9 9 → [1]
    Check: distlab check 4.2
    """
    ### BEGIN SOLUTION monitoring.suspects
    #| which records tell the ranks apart, and which no longer do?
    for records in steps:
        origin = sorted(record.rank for record in records if record.num_nonfinite)
        if origin:
            return origin
    return []
    ### END SOLUTION


def count_nonfinite(gradients: Iterable[Tensor | None]) -> int:
    """Count the elements that are inf, -inf or nan; a gradient may be None.

    Every such element counts, for any shape and strides.
    Check: distlab check 4.2
    """
    ### BEGIN SOLUTION monitoring.suspects
    #| nan == nan is False. how many times is the result read from the device?
    counts = [(~torch.isfinite(g)).sum() for g in gradients if g is not None]
    return int(torch.stack(counts).sum()) if counts else 0
    ### END SOLUTION


def reduce_gradients(comm: Comm, timer: StepTimer, gradients: Sequence[Tensor]) -> int:
    """Average the gradients over the ranks, in place; collective.

    Return count_nonfinite of this rank's own gradients.

    C4 In this rank's own gradients, every inf, -inf and nan is counted, whatever shape
       and strides the tensors have. Only the time until the collectives have finished
       counts as "communication".
    Check: distlab check 4.2
    """
    ### BEGIN SOLUTION monitoring.suspects
    #| what does one rank's nan do to the other ranks, and when?
    num_nonfinite = count_nonfinite(gradients)
    with timer.measure("communication"):
        for gradient in gradients:
            gradient /= comm.world_size
            comm.all_reduce(gradient)
    return num_nonfinite
    ### END SOLUTION


# ── what a profiler's trace says ────────────────────────────────────────────────────


def merge(spans: Iterable[Span]) -> list[Span]:
    """Merge spans of time into spans that don't overlap, in ascending order.

    Given, here and below: (start, end) in µs, start <= end, in any order, maybe nested;
    there may be none.

    C1 The result covers exactly the same moments as the given spans, and covers each
       moment only once.
    Example: (0, 4) (6, 9) (3, 5) (7, 8) → (0, 5) (6, 9). Check: distlab check 4.19
    """
    ### BEGIN SOLUTION monitoring.profile
    #| in which order do you look at them, and when does a new span begin?
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
    ### END SOLUTION


def exposed_us(communication: Iterable[Span], compute: Iterable[Span]) -> float:
    """Return the µs in which the rank communicates but doesn't compute. Given: merge.

    C2 Where several spans overlap, the time is counted only once.
    Check: distlab check 4.19
    In torch.distributed: nothing; Holistic Trace Analysis has get_comm_comp_overlap
    Example: communication (2, 6) (4, 9), compute (0, 3) (5, 7) → 2 + 2 = 4
    """
    ### BEGIN SOLUTION monitoring.profile
    #| how much longer is the time of both together than the time of compute alone?
    compute = merge(compute)
    both = merge([*communication, *compute])
    return sum(end - start for start, end in both) - sum(e - s for s, e in compute)
    ### END SOLUTION


def explain_exposed(communication: Sequence[Span], compute: Sequence[Span]) -> str:
    """Say why a backward()'s communication is exposed. Both lists take more than 0 µs.

    C3 The answer is the first of the following that applies, with all times merged:
       "hidden" if at most 20 % of the communication is exposed; "partial" if at least
       20 % of communication or compute, whichever is shorter, overlaps with the other;
       "late" if at most 20 % of the compute was still to come when the rank first
       communicated; and otherwise "blocking", because compute then stopped to wait.
    Check: distlab check 4.19
    """
    ### BEGIN SOLUTION monitoring.profile
    #| how much of it is exposed, how much is covered, and how much compute comes later?
    total = sum(end - start for start, end in merge(communication))
    exposed, spans = exposed_us(communication, compute), merge(compute)
    work = sum(end - start for start, end in spans)
    if exposed <= 0.2 * total:
        return "hidden"
    if total - exposed >= 0.2 * min(total, work):
        return "partial"
    first = min(communication)[0]
    after = sum(max(0.0, end - max(start, first)) for start, end in spans)
    return "late" if after <= 0.2 * work else "blocking"
    ### END SOLUTION


if __name__ == "__main__":
    for file in sys.argv[1:]:
        spans = read_spans(file)
        print(f"{file}: {exposed_us(*spans):.0f} µs exposed: {explain_exposed(*spans)}")
