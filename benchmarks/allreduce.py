"""The ring of task 3.4 against gloo's own all_reduce, over the same connections.

    distlab bench allreduce [--json]
    python benchmarks/allreduce.py [--launches 5] [--json] [--plot FILE.png]

Both run in the same processes on the same gloo group, pair by pair: ours and gloo's
in turns, the one first and then the other. A ratio is the median over the pairs of all
launches; `upper` is what it stays below in 95 % of the resamplings of launches and
pairs. Columns are those of nccl-tests:

    algbw = S / t        busbw = algbw · 2(n - 1)/n      in 10^9 bytes per second

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

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import FileStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python benchmarks/allreduce.py` starts in benchmarks/

from benchmarks._ratios import Pair, ratio_of, upper_bound  # noqa: E402
from distlab.comm import Comm, TorchComm  # noqa: E402
from distlab.curriculum import load  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KiB": 4 * KIB, "1MiB": MIB, "16MiB": 16 * MIB, "64MiB": 64 * MIB}
CALLS = {"4KiB": 100, "1MiB": 10, "16MiB": 1, "64MiB": 1}  # timed as one
PAIRS = {"4KiB": 20, "1MiB": 20, "16MiB": 40, "64MiB": 16}  # in one launch of two
WORLDS = (2, 4)
BARS = {"ratio_4KiB_n2": 0.8, "ratio_16MiB_n2": 1.0, "ratio_64MiB_n2": 1.0}
Way = Callable[[Comm, torch.Tensor], Any]


# ── in the ranks ────────────────────────────────────────────────────────────────────


def rank_main(rank: int, n: int, folder: str, is_bound: bool) -> None:
    """One rank of one launch; rank 0 writes down what was measured."""
    torch.set_num_threads(1)
    if is_bound:  # before gloo starts its threads, which are bound with it
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    store = FileStore(f"{folder}/store", n)
    comm = TorchComm.from_store(store, rank, n)
    ours: Way = load("ring_allreduce", "reference").pipelined_all_reduce
    peer: Way = TorchComm.all_reduce  # type: ignore[assignment]
    told: dict[str, Any] = {"pairs": {}, "copy": {}}
    for size, num_bytes in SIZES.items():
        expect_equal(comm, ours, peer, num_bytes // 4)
        tensor = torch.zeros(num_bytes // 4)  # sums of zeros do not grow
        calls = CALLS[size]
        for way in (ours, peer):
            seconds(comm, way, tensor, calls)
        told["pairs"][size] = [
            pair(comm, ours, peer, tensor, calls, number)
            for number in range(PAIRS[size] * 2 // n)
        ]
        source = torch.ones_like(tensor)
        copies = [
            seconds(comm, lambda _, t: t.copy_(source), tensor, calls)  # noqa: B023
            for _ in range(5)
        ]
        told["copy"][size] = min(copies)
    if rank == 0:
        Path(folder, "told.json").write_text(json.dumps(told))
    comm.barrier()


def pair(
    comm: Comm, ours: Way, peer: Way, tensor: torch.Tensor, calls: int, number: int
) -> Pair:
    """Seconds of both, measured right after each other; who is first changes."""
    if number % 2:
        theirs = seconds(comm, peer, tensor, calls)
        return seconds(comm, ours, tensor, calls), theirs
    own = seconds(comm, ours, tensor, calls)
    return own, seconds(comm, peer, tensor, calls)


def seconds(comm: Comm, way: Way, tensor: torch.Tensor, calls: int) -> float:
    """Of one call, on average over `calls` in a row; those of the slowest rank."""
    comm.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        way(comm, tensor)
    took = torch.tensor([(time.perf_counter() - started) / calls])
    gathered = torch.empty(comm.world_size)
    comm.all_gather(gathered, took)
    return float(gathered.max())


def expect_equal(comm: Comm, ours: Way, peer: Way, length: int) -> None:
    """Whole numbers, so that both sums are exact."""
    own = torch.arange(length, dtype=torch.float32).remainder(1009) * (comm.rank + 1)
    theirs = own.clone()
    ours(comm, own)
    peer(comm, theirs)
    if not torch.equal(own, theirs):
        raise SystemExit(f"rank {comm.rank}: the sums of {length} numbers differ")


# ── here ────────────────────────────────────────────────────────────────────────────


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


def launch(n: int, is_bound: bool) -> dict[str, Any]:
    """Start n ranks, and what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = mp.spawn  # type: ignore[attr-defined]
        spawn(rank_main, (n, folder, is_bound), n)
        told: dict[str, Any] = json.loads(Path(folder, "told.json").read_text())
    return told


def results_of(
    n: int, told: list[dict[str, Any]], is_bound: bool
) -> list[dict[str, Any]]:
    """The results of all launches of n ranks, in the schema of all benchmarks."""
    results = []
    for size, num_bytes in SIZES.items():
        name = f"{size}_n{n}{other_way(n, num_bytes, is_bound)}"
        launches = [[(own, peer) for own, peer in t["pairs"][size]] for t in told]
        pairs = [pair for launch in launches for pair in launch]
        own_s = statistics.median(own for own, _ in pairs)
        peer_s = statistics.median(peer for _, peer in pairs)
        ratios = sorted(own / peer for own, peer in pairs)
        share = 2 * (n - 1) / n
        copied_s = min(t["copy"][size] for t in told)
        results.append(
            {
                "name": f"ratio_{name}",
                "value": ratio_of(launches),
                "unit": "ours/peer",
                "peer": "gloo all_reduce",
                "upper": upper_bound(launches),
                "bar": BARS.get(f"ratio_{name}"),
                "ours_s": own_s,
                "peer_s": peer_s,
                "n": len(pairs),
                "launches": len(launches),
                "p50": ratios[len(ratios) // 2],
                "p95": ratios[int(0.95 * len(ratios))],
                "size_bytes": num_bytes,
                "count": num_bytes // 4,
                "type": "float",
                "redop": "sum",
                "ranks": n,
                "bound": is_bound,
                "algbw_GBps": num_bytes / own_s / 1e9,
                "busbw_GBps": share * num_bytes / own_s / 1e9,
                "peer_busbw_GBps": share * num_bytes / peer_s / 1e9,
            }
        )
        limit = {"value": 2 * share * copied_s, "unit": "s", "ranks": n}
        limit |= {"bound": is_bound, "busbw_GBps": num_bytes / (2 * copied_s) / 1e9}
        results.append({"name": f"copy_limit_{name}", **limit})
    return results


def missed(results: list[dict[str, Any]]) -> list[str]:
    """The ratios whose upper bound is above their bar."""
    barred = [result for result in results if result.get("bar") is not None]
    return [r["name"] for r in barred if r["upper"] > r["bar"]]


def table(results: list[dict[str, Any]]) -> str:
    """As nccl-tests prints it, with gloo and the limit beside."""
    limits = {r["name"]: r for r in results if r["name"].startswith("copy_limit")}
    head = ["ranks", "bound", "size(B)", "count", "type", "redop", "time(us)"]
    head += ["algbw", "busbw", "gloo(us)", "busbw", "limit(us)"]
    head += ["ratio", "upper", "bar"]
    lines = [" ".join(f"{word:>9}" for word in head)]
    for r in results:
        if not r["name"].startswith("ratio"):
            continue
        limit = limits[r["name"].replace("ratio", "copy_limit")]["value"]
        cells = [r["ranks"], "yes" if r["bound"] else "no", r["size_bytes"]]
        cells += [r["count"], r["type"], r["redop"]]
        cells += [f"{1e6 * r['ours_s']:.1f}", f"{r['algbw_GBps']:.2f}"]
        cells += [f"{r['busbw_GBps']:.2f}", f"{1e6 * r['peer_s']:.1f}"]
        cells += [f"{r['peer_busbw_GBps']:.2f}", f"{1e6 * limit:.1f}"]
        cells += [f"{r['value']:.3f}", f"{r['upper']:.3f}", r["bar"] or "shown"]
        lines.append(" ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Bus bandwidth by size: ours, gloo's and what copying allows."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    results = [r for r in results if r["name"].endswith(f"_n{r['ranks']}")]
    worlds = sorted({r["ranks"] for r in results})
    figure, axes = plt.subplots(1, len(worlds), figsize=(5 * len(worlds), 4))
    for n, axis in zip(worlds, axes, strict=True):
        own = [r for r in results if r["ranks"] == n and "count" in r]
        limits = [r for r in results if r["ranks"] == n and "count" not in r]
        sizes = [r["size_bytes"] for r in own]
        axis.plot(sizes, [r["busbw_GBps"] for r in own], "o-", label="ours")
        axis.plot(sizes, [r["peer_busbw_GBps"] for r in own], "s--", label="gloo")
        axis.plot(sizes, [r["busbw_GBps"] for r in limits], "k:", label="copying")
        axis.set(xscale="log", title=f"{n} ranks", xlabel="bytes", ylabel="busbw GB/s")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    results = []
    for n in WORLDS:
        for is_bound in (True, False) if can_bind(n) else (False,):
            told = [launch(n, is_bound) for _ in range(options.launches)]
            results += results_of(n, told, is_bound)
    if options.plot:
        plot(results, options.plot)
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        report = {"bench": "allreduce", "machine": machine, "results": results}
        print(json.dumps(report))
    else:
        print(table(results))
        late = missed(results)
        print(f"missed: {', '.join(late)}" if late else "all bars are met")
    return int(bool(missed(results)))


if __name__ == "__main__":
    sys.exit(main())
