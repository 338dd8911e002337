"""Real ranks on gloo that hang, and dump torch's flight recorder while they do.

`python flight_ranks.py FOLDER` writes FOLDER/<case>/<kind>_<rank> for each case. The
ranks are forked from one process, so that torch is imported only once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch._inductor.standalone_compile  # which a dump would import on each rank
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from distlab.flight.records import read_dumps

Program = Callable[[int], None]


def mismatch(rank: int) -> None:
    group = dist.new_group([0, 1])
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=group)
    if rank == 0:
        dist.barrier()  # rank 0 hangs here
    else:
        dist.all_reduce(torch.ones(3, dtype=torch.float64))  # ranks 1 and 2 hang here


def absent(rank: int) -> None:
    dist.all_reduce(torch.ones(3))  # the last call of rank 1
    if rank == 0:
        dist.all_gather([torch.ones(2, 4) for _ in range(2)], torch.ones(2, 4))


def circle(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(5), group=group)


def finished(rank: int) -> None:
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.full((2,), float(rank)), src=1)


# The program, and for each rank how many calls have ended and how many it has made.
CASES: dict[str, tuple[Program, list[tuple[int, int]]]] = {
    "mismatch": (mismatch, [(3, 4), (3, 4), (2, 3)]),
    "absent": (absent, [(1, 2), (1, 1)]),
    "circle": (circle, [(0, 1), (0, 1)]),
    "finished": (finished, [(2, 2), (2, 2)]),
}


def run_rank(case: str, rank: int, folder: Path) -> None:
    program, awaited = CASES[case]
    world_size = len(awaited)

    def write() -> None:
        while True:
            (folder / f"part_{rank}").write_bytes(c10d._dump_fr_trace())
            (dump,) = read_dumps([folder / f"part_{rank}"]).dumps.values()
            calls = dump.calls
            if (sum(call.done for call in calls), len(calls)) == awaited[rank]:
                break
            time.sleep(0.01)
        (folder / f"part_{rank}").rename(folder / f"dump_{rank}")
        (folder / f"json_{rank}").write_bytes(c10d._dump_fr_trace_json())
        while any(not (folder / f"json_{r}").exists() for r in range(world_size)):
            time.sleep(0.01)
        os._exit(0)

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    threading.Thread(target=write).start()
    program(rank)


def main(root: Path) -> None:
    children = []
    for case, (_, awaited) in CASES.items():
        (root / case).mkdir()
        for rank in range(len(awaited)):
            child = os.fork()
            if not child:
                run_rank(case, rank, root / case)
                time.sleep(60)  # the thread that writes ends this process
                os._exit(1)
            children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
