"""Run the script on real ranks: one process for each, with gloo and on real time.

This is for scripts that the simulator refuses. If some ranks haven't finished when the
time is up, which takes two minutes, every rank writes its log, and we treat the run as
a deadlock. `distlab run` proves a hang of real ranks in about a second, but we don't
use its proof here yet.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.audit.log import AuditLog
from distlab.audit.play import (
    LIMITS,
    Played,
    events_of_workers,
    set_up,
    settings_of,
    trouble_of,
)
from distlab.given.process_group import free_port
from distlab.runner import Cluster, RankContext

if TYPE_CHECKING:
    from distlab.sim.torch.script import Script

_BEFORE_THE_END_S = 5.0  # so that a rank that hangs has time to write its log


def play_real(
    cluster: Cluster,
    script: Script,
    world_size: int,
    folder: Path,
    *,
    double: bool = False,
) -> Played:
    """Run the script on real ranks; see `play`."""
    settings = {
        **settings_of(script, folder, double=double),
        "port": free_port(),
        "seconds": LIMITS.seconds - _BEFORE_THE_END_S,
    }
    done = cluster.run(watch_one, world_size, settings, limits=LIMITS, journal=False)
    logs = []
    for rank in range(world_size):
        path = folder / f"rank{rank}.pickle"
        if path.is_file():
            with path.open("rb") as file:
                logs.append(pickle.load(file))
            logs[-1].events += events_of_workers(logs[-1])
    stuck = done.outcome == "timeout" and len(logs) == world_size
    return Played(
        world_size,
        "deadlock" if stuck else done.outcome,
        done.explanation,
        logs if len(logs) == world_size else [],
        [trouble for trouble in map(trouble_of, done.ranks) if trouble],
        done.ranks[0].output,
    )


# ── in the process of one rank ──────────────────────────────────────────────────────


def watch_one(context: RankContext, settings: dict[str, Any]) -> None:
    """Run the script in this process as one rank, and write its log."""
    import torch.distributed as dist

    from distlab.audit import watching

    rank, world_size = context.rank, context.world_size
    if dist.is_initialized():
        dist.destroy_process_group()  # the runner's, because the script makes its own
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(settings["port"]),
    }
    set_up(settings)
    folder = Path(settings["folder"])
    with watching.installed(), watching.watched(rank, folder) as log:
        timer = threading.Timer(settings["seconds"], _write, (log, folder))
        timer.daemon = True
        timer.start()
        try:
            _execute(*settings["script"])
        finally:
            timer.cancel()
            _write(log, folder)


def _execute(target: str, arguments: tuple[str, ...], is_module: bool) -> None:
    sys.argv = [target, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise RuntimeError(f"the script called sys.exit({left.code!r})") from left


def _write(log: AuditLog, folder: Path) -> None:
    with (folder / f"rank{log.rank}.pickle").open("wb") as file:
        pickle.dump(log, file)
