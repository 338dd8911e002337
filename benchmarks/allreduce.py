"""The ring of task 3.4 against gloo's own all_reduce, over the same connections.

    distlab bench allreduce [--json]
    python benchmarks/allreduce.py [--launches 5] [--code mine] [--json]

Both run in the same processes on the same gloo group, pair by pair: ours and gloo's
in turns, the one first and then the other. A ratio is the median over the pairs of all
launches; `upper` is what it stays below in 95 % of the resamplings of launches and
pairs. The JSON has algbw = S / t and busbw = algbw · 2(n - 1)/n too, as nccl-tests.

On one machine every byte that is sent is copied twice by a processor, into the kernel
and out of it. So `copy_limit` is a time that no all-reduce over sockets can beat:
2 · 2(n - 1)/n · S at the speed with which n processes copy memory at once.

Where there is a core for each rank, every launch is made twice: with its ranks bound to
one core each, as mpirun binds them, and free. Bound, what gloo's thread has received is
in the cache of the core that adds it; free, the threads of two ranks wander over the
cores. Small messages want it the other way round: on one core, a thread of gloo's that
polls keeps the rank's own from going on. So the bars hold for bound ranks from 1 MiB
on, below it for free ones; the other way is shown, as `_free` or `_bound`. More ranks
than cores are shown, and not barred.

Exits with 1 if a bar is missed or a sum is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import _allreduce_ranks as ranks
from benchmarks._allreduce_ranks import MIB, SIZES
from benchmarks._bars import Bench, Line
from benchmarks._ratios import on_ranks, slowest
from distlab.runner import Cluster

WORLDS = (2, 4)
BENCH = Bench(
    "allreduce",
    __doc__,
    at_most={"ratio_4KiB_n2": 0.8, "ratio_16MiB_n2": 1.0, "ratio_64MiB_n2": 1.0},
)


def can_bind(n: int) -> bool:
    """Whether each of n ranks can have a core; macOS has no such call."""
    cores: Callable[[int], set[int]] | None
    cores = getattr(os, "sched_getaffinity", None)
    return cores is not None and n <= len(cores(0))


def other_way(n: int, num_bytes: int, is_bound: bool) -> str:
    """What is added to the names of results for which no bar is meant."""
    if not can_bind(n) or is_bound == (num_bytes >= MIB):
        return ""
    return "_bound" if is_bound else "_free"


def results_of(n: int, told: list[list[Any]], is_bound: bool) -> list[Line]:
    """The figures of all launches of n ranks, from what each rank measured."""
    lines = []
    for size, num_bytes in SIZES.items():
        name = f"{size}_n{n}{other_way(n, num_bytes, is_bound)}"
        rows = [slowest([own[size] for own in launch]) for launch in told]
        launches = [[(own, peer) for own, peer, _ in launch] for launch in rows]
        line = BENCH.ratio(f"ratio_{name}", launches, "gloo all_reduce", ranks=n)
        share = 2 * (n - 1) / n
        copied_s = min(copy_s for launch in rows for *_, copy_s in launch)
        line |= {
            "note": f"{1e6 * line['ours_s']:.0f} µs, gloo {1e6 * line['peer_s']:.0f}",
            "size_bytes": num_bytes,
            "bound": is_bound,
            "algbw_GBps": num_bytes / line["ours_s"] / 1e9,
            "busbw_GBps": share * num_bytes / line["ours_s"] / 1e9,
            "peer_busbw_GBps": share * num_bytes / line["peer_s"] / 1e9,
        }
        limit = {"ranks": n, "bound": is_bound}
        limit["busbw_GBps"] = num_bytes / (2 * copied_s) / 1e9
        lines += [
            line,
            BENCH.line(f"copy_limit_{name}", 2 * share * copied_s, "s", **limit),
        ]
    return lines


def measure(launches: int, code: str) -> list[Line]:
    """All figures of this code: mine, reference or a file."""
    lines = []
    with Cluster(preload=("torch._dynamo", ranks.__name__)) as cluster:
        for n in WORLDS:
            for is_bound in (True, False) if can_bind(n) else (False,):
                told = [
                    on_ranks(cluster, ranks.timed, n, code, is_bound)
                    for _ in range(launches)
                ]
                lines += results_of(n, told, is_bound)
    return lines


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, launches=5, code="reference"))
