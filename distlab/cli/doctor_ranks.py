"""`distlab doctor --ranks N`: do N ranks of this machine talk to each other?

We start them with distlab.launch, like a training, and not with the runner that
checks tasks, and print five lines: meeting, messages, a small and a large sum, the end.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distlab.cli.doctor import Finding, tell
from distlab.launch import launch_distributed_training, selftest_script
from distlab.processes.tree import descendants
from distlab.runner.limits import MAX_RANKS

Launch = Callable[..., int]
_START_ADVICE = "Look at what the ranks printed above, then run: distlab doctor"


def doctor_of_ranks(num_ranks: int, *, as_json: bool = False) -> int:
    """Test this many ranks and print the findings; return 0 if fine, 1 if broken.

    Raises:
        ValueError: the number of ranks is out of range.
    """
    return tell(check_ranks(num_ranks), as_json=as_json, ready="")


def check_ranks(
    num_ranks: int, launch: Launch = launch_distributed_training
) -> Iterator[Finding]:
    """Start `num_ranks` ranks and yield five findings, or one if they don't start.

    Raises:
        ValueError: the number of ranks is out of range.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"--ranks {num_ranks}: choose between 1 and {MAX_RANKS}")
    before = set(descendants(os.getpid()))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        result = Path(folder) / "result.json"
        code = launch(
            selftest_script(), result, nproc_per_node=num_ranks, log_dir=folder
        )
        seconds = time.perf_counter() - began
        found = (
            json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        )
    name = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    if code or not found:
        figure = f"exit code {code}" if code else "the ranks wrote no result"
        yield Finding(name, "broken", figure, advice=_START_ADVICE)
        return
    agent = "the agent kept their store"
    met = f"met in {found['met_s']:.2f} s"
    yield Finding(name, "ok", met, agent)
    ring = f"{found['ring_s'] * 1e3:.2f} ms per message, once around the ring"
    alone = "a single rank has nobody to send to"
    yield Finding("send, recv", "ok", ring if num_ranks > 1 else alone)
    yield Finding("all_reduce", "ok", f"{found['small_s'] * 1e3:.2f} ms for 8 bytes")
    yield _large(found["large_s"], num_ranks)
    yield _end(set(descendants(os.getpid())) - before, seconds)


def _large(seconds: float, num_ranks: int) -> Finding:
    sent_mib = 2 * (num_ranks - 1) / num_ranks * 4  # a rank's share of a ring
    rate = f"{sent_mib / 1024 / seconds:.2f} GiB/s sent by each rank"
    return Finding("all_reduce", "ok", f"{seconds * 1e3:.1f} ms for 4 MiB", rate)


def _end(left: set[int], seconds: float) -> Finding:
    if left:
        pids = ", ".join(map(str, sorted(left)))
        advice = f"End them with: kill {pids.replace(', ', ' ')}"
        return Finding("the end", "broken", f"still running: {pids}", advice=advice)
    return Finding("the end", "ok", "exit code 0, nothing is left", f"{seconds:.1f} s")
