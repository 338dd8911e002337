"""Run a user's own script on all ranks, for `distlab train`.

    started by torchrun or srun    this process is a rank: run the script
    started by hand               start the ranks, which run the script

The script finds its ranks as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT are set. If it uses a trainer of this package, the trainer takes part in
the job, with the backend that the command line names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.cost import SECONDS_AN_HOUR
from distlab.engines import tensorflow_rank
from distlab.engines.config import BACKEND_VARIABLE, DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.start import expect_gpus, is_rank, run_here
from distlab.engines.tensorflow_start import tensorflow
from distlab.launch import launch_distributed_training

OUTSIDE = ("ray", "horovod")  # they start the ranks themselves


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
    if address is not None and config.backend != "ray":
        raise EngineError(f"an address is for backend ray; backend is {config.backend}")
    with _named_backend(config.backend):
        if config.backend == "tensorflow":
            tensorflow()  # refused here, in one line, not by each rank
        if is_rank():
            if config.backend == "tensorflow":
                return tensorflow_rank.main(
                    config.communication_backend, script, arguments
                )
            return run_here(script, arguments)
        if config.backend in OUTSIDE and config.max_cost is not None:
            raise EngineError(
                f"distlab train cannot end the ranks of {config.backend} at max_cost: "
                "give it to the trainer in the script"
            )
        if config.backend == "ray":
            from distlab.engines.ray_engine import run_script_on_ray

            return run_script_on_ray(script, arguments, config, address)
        if config.backend == "horovod":
            from distlab.engines.horovod_engine import run_script_on_horovod

            return run_script_on_horovod(script, arguments, config, log_dir or Path())
        expect_gpus(config)
        with capped(config) as cap:
            code = _launch(script, arguments, config, meeting or NodeMeeting(), log_dir)
        return 1 if cap.is_reached else code


def _launch(
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    meeting: NodeMeeting,
    log_dir: Path | None,
) -> int:
    program, given = script, [*arguments]
    if config.backend == "tensorflow":
        wire = config.communication_backend or tensorflow_rank.ANY
        program = Path(tensorflow_rank.__file__)
        given = [wire, str(script), *arguments]
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
