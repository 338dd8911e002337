"""Test, under any launcher, that ranks can talk and that their numbers agree.

    python -m distlab.launch --nproc-per-node 4 distlab/launch/selftest.py result.json

It uses plain torch.distributed over gloo. Rank 0 writes its measurements to a file. If
a number is wrong, the script ends with a one-sentence message.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SMALL, LARGE = 2, 1 << 20  # elements of float32: 8 bytes and 4 MiB
TIMES = 20


def main(path: str = "") -> None:
    """Meet, pass numbers around, add them up, and write the seconds to `path`."""
    started = time.perf_counter()
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    found = {"met_s": time.perf_counter() - started}
    found["ring_s"] = seconds(lambda: once_around(rank, n)) / n
    found["small_s"] = seconds(lambda: add_up(rank, n, SMALL))
    found["large_s"] = seconds(lambda: add_up(rank, n, LARGE))
    dist.barrier()
    if rank == 0 and path:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def seconds(call: Callable[[], None]) -> float:
    """Return the median time of several calls that all ranks start together."""
    times = []
    for _ in range(TIMES):
        dist.barrier()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def once_around(rank: int, n: int) -> None:
    """Pass a number from rank 0 through all ranks, each of which adds its own.

    Raises:
        SystemExit: the number is wrong when it comes back.
    """
    token = torch.zeros(1)
    if n == 1:
        return
    if rank:
        dist.recv(token, rank - 1)
    token += rank
    dist.send(token, (rank + 1) % n)
    if rank == 0:
        dist.recv(token, n - 1)
        expect("a number once around", token.item(), n * (n - 1) / 2)


def add_up(rank: int, n: int, num_elements: int) -> None:
    """all_reduce numbers whose sum each rank can check by itself.

    Raises:
        SystemExit: the sum is wrong.
    """
    values = torch.full((num_elements,), float(rank + 1))
    dist.all_reduce(values)
    low, high = values.min().item(), values.max().item()
    wanted = n * (n + 1) / 2
    expect(f"all_reduce of {num_elements} numbers", low, wanted)
    expect(f"all_reduce of {num_elements} numbers", high, wanted)


def expect(what: str, found: float, wanted: float) -> None:
    """Refuse a wrong number.

    Raises:
        SystemExit: the number is wrong.
    """
    if found != wanted:
        sys.exit(f"{what} gave {found:g}, must be {wanted:g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
