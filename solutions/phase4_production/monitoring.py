"""Monitoring: what each rank records in a step, and what the records say together.

Guide: phase4_production/guide/monitoring.md.
Source: Z. Jiang et al., MegaScale (NSDI 2024), section 5, for per-rank records and
stragglers; T. Wu et al., FALCON (arXiv 2410.12588), section 3, for slow ranks.
Symbols: n = the number of ranks. A step has three parts: data, compute, communication.
Cost: one all_gather of 8 numbers per rank and step.

    rank 0   data ██ compute █████ communication ░░░░░░░   waits for rank 1
    rank 1   data ██ compute ███████████ communication ░   the slow one
    rank 2   data █ compute ██████ communication ░░░░░░░   waits for rank 1

A rank measures and counts by itself; no rank can say alone which of them is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from distlab.comm import Comm

PARTS = ("data", "compute", "communication")


class Record(NamedTuple):
    """What one rank recorded in one step.

    A rank without samples has num_samples 0 and the loss nan: a mean of nothing.
    """

    rank: int
    data_s: float  # waiting for the next batch
    compute_s: float  # forward, backward, optimizer
    communication_s: float  # collectives; waiting for other ranks is a part of it
    loss: float  # the mean over the rank's own samples
    num_samples: int
    num_nonfinite: int = 0  # elements of its gradients that were inf or nan
    checksum: int = 0  # of its weights after the step, below 2^32


def pack(record: Record) -> list[float]:
    """The record as 8 numbers, to be sent as float64."""
    return [float(number) for number in record]


def unpack(numbers: Sequence[float]) -> Record:
    """The record of these 8 numbers."""
    rank, data_s, compute_s, communication_s, loss, *counts = numbers
    seconds = data_s, compute_s, communication_s
    return Record(int(rank), *seconds, loss, *map(int, counts))


# ── what a rank measures ────────────────────────────────────────────────────────────


def now_s() -> float:
    """The seconds of a clock. Only the difference of two calls has a meaning.

    C1 the clock goes forward only, also when the machine's time of day is corrected;
    it counts the seconds in which this process waits, too
    In torch.distributed: its timeouts count on such a clock; CUDA events for a GPU
    Check: distlab check 4.1
    """
    ### BEGIN SOLUTION monitoring.step_report
    #| the module time has several clocks. which ones can go back? which ones stop
    #| while a process waits?
    return time.perf_counter()
    ### END SOLUTION


class StepTimer:
    """The seconds of each part of the current step.

    `with timer.measure("compute"):` around the code of that part.
    """

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the seconds that the block takes to those of `part`.

        Given: `self.clock()` returns the time now in seconds.

        C1 a part may be measured several times in a step: its seconds add up
        Example: data 0.5 s, compute 2 s, data 0.25 s → data 0.75, compute 2
        Check: distlab check 4.1
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


class Shares(NamedTuple):
    """Fractions of a rank's step; they add up to 1."""

    data: float
    compute: float
    communication: float


class StepReport(NamedTuple):
    """One step of all ranks."""

    shares: dict[int, Shares]  # by rank
    loss: float
    samples_per_s: float


def step_report(records: Sequence[Record]) -> StepReport:
    """Summarize a step from the records of its ranks.

    Given: at least one record; they come in any order, and ranks may be missing. Each
    rank's three parts take more than 0 s together. A rank may have no samples.

    C2 `shares`: each part's seconds over the seconds of that rank's step
    C3 `loss`: the mean over the samples of all ranks; nan only if a rank with samples
    has nan, or no rank has samples. `samples_per_s`: the samples of all ranks over the
    seconds of the slowest rank's step
    In torch.distributed: nothing; torchmetrics has such means
    Example: losses 2, 5 and nan of 3, 1 and 0 samples → loss 2.75
    Check: distlab check 4.1
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
    """Collective: the records of all ranks, on every rank, in the order of comm.rank.

    Also: pack, unpack. `record.rank` need not be comm.rank.

    C4 every rank has every record, exactly; one collective call, and the numbers are
    read from the result at once: on a GPU each .item() waits for the device
    In torch.distributed: dist.all_gather_into_tensor(output, input)
    Cost: one all_gather of 8 float64. Check: distlab check 4.1
    """
    ### BEGIN SOLUTION monitoring.step_report
    #| one tensor, one call. a checksum has up to 32 bits: which dtype holds it exactly?
    own = torch.tensor(pack(record), dtype=torch.float64, device=comm.device)
    gathered = own.new_empty(comm.world_size * len(own))
    comm.all_gather(gathered, own)
    return [unpack(row) for row in gathered.view(comm.world_size, -1).tolist()]
    ### END SOLUTION
