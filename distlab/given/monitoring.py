"""The fields of the records in unit `monitoring`, and how ranks send them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, uint8

PARTS = ("data", "compute", "communication")


class Record(NamedTuple):
    """The measurements of one rank in one step.

    A rank without samples has num_samples 0, and its loss is nan, the mean of nothing.
    """

    rank: int
    data_s: float  # waiting for the next batch
    compute_s: float  # forward, backward, optimizer
    communication_s: float  # collectives; waiting for other ranks is a part of it
    loss: float  # the mean over the rank's own samples
    num_samples: int
    num_nonfinite: int = 0  # elements of its own gradients that were inf or nan
    checksum: int = 0  # of its weights after the step, below 2^32


def pack(record: Record) -> list[float]:
    """Convert the record to 8 numbers, which you can send as float64."""
    return [float(number) for number in record]


def unpack(numbers: Sequence[float]) -> Record:
    """Convert 8 numbers from `pack` back to a record."""
    rank, data_s, compute_s, communication_s, loss, *counts = numbers
    seconds = data_s, compute_s, communication_s
    return Record(int(rank), *seconds, loss, *map(int, counts))


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number below 2^32 that almost certainly changes if any bit changes."""
    value = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(uint8)
        value = zlib.crc32(flat.numpy().tobytes(), value)
    return value


class Shares(NamedTuple):
    """Fractions of a rank's step; they add up to 1."""

    data: float
    compute: float
    communication: float


class StepReport(NamedTuple):
    """A summary of one step on all ranks."""

    shares: dict[int, Shares]  # by rank
    loss: float
    samples_per_s: float


class Suspects(NamedTuple):
    """The ranks that the records point at, in ascending order; often there are none."""

    stragglers: list[int]
    desynchronized: list[int]
    nan_origin: list[int]


Span = tuple[float, float]
"""Start and end of an event, in µs."""


class Spans(NamedTuple):
    """The spans in one rank's trace, in any order; they may overlap."""

    communication: list[Span]
    compute: list[Span]


def read_spans(path: str | Path) -> Spans:
    """Read the spans from a file that torch.profiler's export_chrome_trace wrote.

    On a GPU, the kernels of NCCL count as communication and all others as compute. On a
    CPU, gloo's threads annotate their collectives, and torch's operators count as
    compute. Operators are nested: aten::linear contains aten::addmm, for example.
    """
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    if kernels:
        collectives = [e for e in kernels if e["name"].startswith("nccl")]
        operators = [e for e in kernels if not e["name"].startswith("nccl")]
    else:
        collectives = [e for e in timed if e["name"].startswith("gloo:")]
        operators = [e for e in timed if e["name"].startswith("aten::")]
    communication, compute = (
        [(float(e["ts"]), float(e["ts"] + e["dur"])) for e in found]
        for found in (collectives, operators)
    )
    return Spans(communication, compute)
