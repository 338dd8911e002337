"""Start the ranks of a job on this machine, or take part in a running one.

RANK, SLURM_PROCID … is set      this process is a rank: train here
one rank                         train here
more                             distlab.launch starts distlab/engines/rank.py
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from distlab.engines import job as jobs
from distlab.engines import rank as ranks
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.job import Outcome, TrainingJob
from distlab.engines.strategies import Starter, is_rank
from distlab.engines.worker import train
from distlab.launch import LaunchError, launch_distributed_training, rank_environment


def run(job: TrainingJob, starter: Starter | None = None) -> Outcome:
    """Train `job` on its ranks; this process may or may not be one of them.

    Raises:
        EngineError: the training can't start, or a rank failed.
    """
    if is_rank():
        return take_part(job)
    if job.config.num_nodes > 1:
        raise EngineError(
            f"num_nodes is {job.config.num_nodes}: start the script on every node, "
            "with distlab train, torchrun or srun"
        )
    if job.config.world_size == 1 and starter is None:
        return train(job)
    return start(job, starter or launch_ranks)


def take_part(job: TrainingJob, starter: Starter | None = None) -> Outcome:
    """Train as one rank of the job that this process belongs to; collective."""
    with job_of_launcher():
        return train(job)


def run_here(script: Path, arguments: Sequence[str]) -> int:
    """Run the job in this process, which a launcher has started as one rank."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with job_of_launcher():
        runpy.run_path(str(script), run_name="__main__")
    return 0


@contextlib.contextmanager
def job_of_launcher() -> Iterator[None]:
    """Set srun's variables under torch's names in this block."""
    added = rank_environment(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def start(job: TrainingJob, starter: Starter) -> Outcome:
    """Start other processes for all ranks of `job`, and wait for them.

    Raises:
        EngineError: the ranks can't start, or one failed, whose message this is.
    """
    expect_gpus(job.config)
    expect_no_profiler()
    with tempfile.TemporaryDirectory(prefix="distlab-") as name:
        folder = Path(name)
        try:
            jobs.write(job, folder / ranks.JOB)
        except Exception as error:  # an object's __reduce__ may raise anything
            raise EngineError(
                f"the job cannot be sent to other processes: {jobs.first_line(error)}"
            ) from error
        code = starter(folder, job.config)
        if code == 0:
            outcome: Outcome = jobs.read(folder / ranks.OUTCOME)
            return outcome
        raise EngineError(what_failed(folder, job.config.world_size, code))


def launch_ranks(folder: Path, config: DistributedConfig) -> int:
    """Launch the ranks, but drop lines about failures, which `start` reports."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = launch_distributed_training(
                ranks.__file__, folder, nproc_per_node=config.world_size, log_dir=folder
            )
        except LaunchError as error:
            raise EngineError(str(error)) from error
    if code and said.getvalue():
        (folder / "launch.txt").write_text(said.getvalue(), encoding="utf-8")
    if code == 130:
        raise KeyboardInterrupt
    return code


def expect_gpus(config: DistributedConfig) -> None:
    """Check that there is a GPU for each rank, if the ranks use GPUs.

    Raises:
        EngineError: there are too few GPUs, or none for nccl.
    """
    num_gpus = torch.cuda.device_count()
    uses_gpus = num_gpus > 0 and config.communication_backend != "gloo"
    if config.communication_backend == "nccl" and num_gpus == 0:
        raise EngineError(
            "communication_backend nccl needs a GPU for each rank, and torch finds "
            "none: choose gloo"
        )
    if uses_gpus and num_gpus < config.world_size:
        raise EngineError(
            f"{config.world_size} ranks need as many GPUs, and torch finds {num_gpus}: "
            "num_gpus must not be more, or communication_backend='gloo' uses the CPU"
        )


def expect_no_profiler() -> None:
    """Refuse a profiler, because it would see nothing of other processes.

    Raises:
        EngineError: torch's profiler is active in this process.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise EngineError(
            "torch's profiler is active around fit(), but the ranks are other "
            "processes, which it doesn't see: give the trainer profile_dir=…, and each "
            "rank writes a trace"
        )


def what_failed(folder: Path, world_size: int, code: int) -> str:
    """Return what the first failed rank recorded, or else the launcher."""
    told = [
        (path.stat().st_mtime_ns, rank, path.read_text(encoding="utf-8"))
        for rank in range(world_size)
        if (path := ranks.error_file(folder, rank)).exists()
    ]
    if told:
        _, rank, said = min(told)
        return f"rank {rank} failed: {said}"
    report = folder / "launch.txt"
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    said = lines[0].removeprefix("distlab.launch: ") if lines else f"exit code {code}"
    return f"the ranks did not finish: {said}"
