"""Record the three traces of 4.19: one backward() each, of torch's DDP on gloo.

    python benchmarks/record_traces.py [--only run_1] [--out FOLDER]

Two processes train a few steps; then torch.profiler records backward() on rank 0. What
4.19 reads of it is kept, and the operators around it: each file opens in
https://ui.perfetto.dev. On a busy machine collectives take longer, and compute pauses:
look at the result, and record it again if another process shows in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "phase4_production" / "traces"
RANKS, WARM_STEPS = 2, 4
LAYERS, WIDTH = 12, 256
SHORTEST_US = 30.0  # of the operators that are kept


class Setting(NamedTuple):
    """The batches of both ranks, and the size of DDP's buckets."""

    batches: tuple[int, int]
    bucket_mib: float


SETTINGS = {
    "run_1": Setting(batches=(1536, 4608), bucket_mib=0.25),
    "run_2": Setting(batches=(4096, 4096), bucket_mib=1000),
    "run_3": Setting(batches=(4096, 4096), bucket_mib=0.25),
}
"""Rank 1 has three times the samples; one bucket for all; a bucket for each layer."""


def train(rank: int, setting: Setting, store: str, out: str) -> None:
    """One rank's program: rank 0 writes the trace of its last backward()."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    ddp = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=setting.bucket_mib
    )
    inputs = torch.randn(setting.batches[rank], WIDTH)
    for _ in range(WARM_STEPS):
        ddp(inputs).square().mean().backward()
    loss = ddp(inputs).square().mean()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    dist.barrier()
    if rank == 0:
        profiler.export_chrome_trace(out)
    dist.destroy_process_group()


def trimmed(trace: dict[str, Any]) -> dict[str, Any]:
    """Collectives and operators with a duration, from time 0; no names of machines."""
    timed = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event["cat"] in ("cpu_op", "user_annotation")
    ]
    kept = [
        event
        for event in timed
        if event["name"].startswith(("gloo:", "c10d::"))
        or (event["dur"] >= SHORTEST_US and not event["name"].startswith("Dist"))
    ]
    threads = sorted({event["tid"] for event in kept}, key=str)
    begin = min(event["ts"] for event in kept)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "ph": "X",
                "cat": event["cat"],
                "name": event["name"],
                "pid": 0,
                "tid": threads.index(event["tid"]),
                "ts": round(event["ts"] - begin, 1),
                "dur": round(event["dur"], 1),
            }
            for event in sorted(kept, key=lambda event: float(event["ts"]))
        ],
    }


def record(name: str, folder: Path) -> Path:
    """Run the ranks of a setting; the trimmed trace of rank 0."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "trace.json"
        command = [sys.executable, __file__, "--name", name]
        command += ["--store", f"{temporary}/store", "--out", str(out)]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(RANKS)
        ]
        codes = [process.wait(timeout=300) for process in ranks]
        if any(codes):
            raise SystemExit(f"{name}: the ranks ended with {codes}")
        trace = trimmed(json.loads(out.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    lines = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
    head = json.dumps(trace)[:-1]
    text = f'{head}, "traceEvents": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def main() -> None:
    """Record all settings, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(FOLDER))
    parser.add_argument("--only", choices=SETTINGS)
    for hidden in ("--name", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, SETTINGS[given.name], given.store, given.out)
        return
    for name in [given.only] if given.only else SETTINGS:
        print(record(name, Path(given.out)))


if __name__ == "__main__":
    main()
