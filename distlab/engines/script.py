"""Run a user's own script on all ranks, for `distlab train`.

    started by torchrun or srun    this process is a rank: run the script
    started by hand               start the ranks, which run the script

The script finds its ranks as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT are set. If it uses a trainer of this package, the trainer takes part in
the job, with the backend that the command line names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.cost import SECONDS_AN_HOUR
from distlab.engines.config import BACKEND_VARIABLE, DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.start import expect_gpus, run_here
from distlab.engines.strategies import Entry, find_strategy, is_rank, strategies
from distlab.launch import launch_distributed_training

ANY = "any"  # a rank's communication backend if you name none


@dataclass(frozen=True, kw_only=True)
class NodeMeeting:
    """The address where the agents of several nodes meet, and this node's number."""

    node_rank: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def run_script(
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    *,
    meeting: NodeMeeting | None = None,
    log_dir: Path | None = None,
    address: str | None = None,
) -> int:
    """Run `script` on the ranks of `config`; return the exit code.

    Raises:
        EngineError, LaunchError: the ranks can't start; the message is one line.
    """
    if not script.is_file():
        raise EngineError(f"the script {script} is not there")
    entry = find_strategy(config.backend)
    if address is not None and "address" not in entry.takes:
        able = " or ".join(one.name for one in strategies() if "address" in one.takes)
        raise EngineError(f"an address is for backend {able}; backend is {entry.name}")
    with _named_backend(config.backend):
        entry.expect_installed()  # refused here, in one line, not by each rank
        if is_rank():
            return _run_as_rank(entry, config, script, arguments)
        if entry.run_script is None:
            expect_gpus(config)
            with capped(config) as cap:
                place = meeting or NodeMeeting()
                code = _launch(entry, script, arguments, config, place, log_dir)
            return 1 if cap.is_reached else code
        if config.max_cost is not None:
            raise EngineError(
                f"distlab train cannot end the ranks of {config.backend} at max_cost: "
                "give it to the trainer in the script"
            )
        return entry.run_script(
            script, arguments, config, log_dir=log_dir, address=address
        )


def _run_as_rank(
    entry: Entry, config: DistributedConfig, script: Path, arguments: Sequence[str]
) -> int:
    if not entry.script_runner:
        return run_here(script, arguments)
    runner = importlib.import_module(entry.script_runner)
    code: int = runner.main(config.communication_backend or ANY, script, arguments)
    return code


def _launch(
    entry: Entry,
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    meeting: NodeMeeting,
    log_dir: Path | None,
) -> int:
    program, given = script, [*arguments]
    if entry.script_runner:
        program = Path(str(importlib.import_module(entry.script_runner).__file__))
        given = [config.communication_backend or ANY, str(script), *arguments]
    nodes: dict[str, object] = {}
    if config.num_nodes > 1:
        nodes = {"nnodes": config.num_nodes, **vars(meeting)}
    return launch_distributed_training(
        program,
        *given,
        nproc_per_node=config.ranks_per_node,
        backend=config.communication_backend
        or ("nccl" if torch.cuda.is_available() else "gloo"),
        log_dir=log_dir,
        explain_hangs=True,
        **nodes,
    )


@contextlib.contextmanager
def _named_backend(name: str) -> Iterator[None]:
    before = os.environ.get(BACKEND_VARIABLE)
    os.environ[BACKEND_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[BACKEND_VARIABLE]
        else:
            os.environ[BACKEND_VARIABLE] = before


class Cap:
    """Remembers if the cost cap has ended the ranks."""

    is_reached = False


@contextlib.contextmanager
def capped(config: DistributedConfig) -> Iterator[Cap]:
    """Send this process SIGTERM once the ranks have cost `max_cost`.

    The launcher passes it on to the ranks, which have 30 s to save and end.
    """
    cap = Cap()
    if config.max_cost is None:
        yield cap
        return
    rate = config.cost_per_gpu_hour * config.world_size
    limit_s = config.max_cost / rate * SECONDS_AN_HOUR

    def end() -> None:
        cap.is_reached = True
        print(
            f"distlab train: max_cost {config.max_cost:g} is reached after "
            f"{limit_s:.0f} s: the ranks end",
            file=sys.stderr,
        )
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield cap
    finally:
        timer.cancel()
