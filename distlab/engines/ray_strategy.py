"""Run the worker in the processes of a Ray cluster.

    fit() ─▶ TorchTrainer, a worker per rank ─▶ train(job) in each ─▶ an actor ─▶ fit()

Ray starts the processes, on this machine or on a cluster, and opens torch's default
group in them. Rank 0 sends its outcome to an actor, so no shared disk is needed.
Inside a trial of Ray Tune, it uses that trial's cluster.

Source: Ray Train's documentation, "TorchTrainer" and "TorchConfig".
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle  # type: ignore[import-untyped]
import torch

from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.job import Outcome, TrainingJob, first_line
from distlab.engines.outside import engine
from distlab.engines.start import expect_no_profiler
from distlab.engines.strategies import register_strategy
from distlab.engines.torch_strategy import OF_DDP, Torch

OBJECT_STORE_BYTES = 100 << 20  # Ray's own default takes a third of the memory
ANSWER_S = 5.0


def train_on_ray(job: TrainingJob, address: str | None) -> Outcome:
    """Train `job` on ranks that Ray starts.

    Raises:
        EngineError: the job can't be sent, Ray can't be reached, or a rank failed.
    """
    expect_no_profiler()
    try:
        sent = cloudpickle.dumps(job)
    except Exception as error:  # an object's __reduce__ may raise anything
        raise EngineError(
            f"the job cannot be sent to other processes: {first_line(error)}"
        ) from error

    def as_rank() -> bytes:
        from distlab.engines.worker import train

        return cloudpickle.dumps(train(pickle.loads(sent)))  # type: ignore[no-any-return]

    outcome: Outcome = pickle.loads(on_ray(as_rank, job.config, address))
    return outcome


def run_script_on_ray(
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    *,
    address: str | None,
    log_dir: Path | None = None,
) -> int:
    """Run a user's script as every rank; return 0, because a failed rank raises."""
    path, own = script.resolve(), list(arguments)

    def as_rank() -> bytes:
        from distlab.engines.start import run_here

        return str(run_here(path, own)).encode()

    return int(on_ray(as_rank, config, address, shows_output=True))


def on_ray(
    as_rank: Callable[[], bytes],
    config: DistributedConfig,
    address: str | None,
    *,
    shows_output: bool = False,
) -> bytes:
    """Call a function on every rank of a group on Ray; return rank 0's result.

    Raises:
        EngineError: Ray isn't installed or can't be reached, or a rank failed.
    """
    ray = engine("ray", "ray")
    train = engine("ray.train", "ray")
    torch_train = engine("ray.train.torch", "ray")
    uses_gpus = torch.cuda.is_available() and config.communication_backend != "gloo"
    wire = config.communication_backend or ("nccl" if uses_gpus else "gloo")
    with (
        joined(ray, address, config.world_size, shows_output=shows_output),
        tempfile.TemporaryDirectory(prefix="dl-") as place,
    ):
        mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()

        def loop() -> None:
            value = as_rank()
            if int(os.environ["RANK"]) == 0:
                ray.get(mailbox.put.remote(value))

        trainer = torch_train.TorchTrainer(
            loop,
            torch_config=torch_train.TorchConfig(backend=wire),
            scaling_config=train.ScalingConfig(
                num_workers=config.world_size, use_gpu=uses_gpus
            ),
            run_config=train.RunConfig(storage_path=place),
        )
        try:
            trainer.fit()
        except Exception as error:  # Ray's own, which differ between versions
            raise EngineError(said(error)) from error
        value: bytes = ray.get(mailbox.take.remote())
        return value


@contextlib.contextmanager
def joined(
    ray: Any, address: str | None, num_workers: int, *, shows_output: bool = False
) -> Iterator[None]:
    """Enter this process's Ray cluster, or open one as `open_ray` does.

    Raises:
        EngineError: we can't reach Ray.
    """
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                open_ray(ray, address, num_workers, folder, shows_output=shows_output)
            except EngineError:
                raise
            except Exception as error:  # a bare Exception where a node is too slow
                ray.shutdown()
                raise EngineError(said(error)) from error
            stack.callback(ray.shutdown)
        yield


class Mailbox:
    """An actor that keeps one value."""

    def __init__(self) -> None:
        self.value = b""

    def put(self, value: bytes) -> None:
        """Store the value."""
        self.value = value

    def take(self) -> bytes:
        """Return the stored value."""
        return self.value


def open_ray(
    ray: Any, address: str | None, num_workers: int, folder: str, *, shows_output: bool
) -> None:
    """Join the cluster at `address`, or start one here, with its files in `folder`.

    Raises:
        EngineError: nothing answers at the address.
    """
    quiet = {"log_to_driver": shows_output, "logging_level": "error"}
    folders = os.pathsep.join(dict.fromkeys(map(os.path.abspath, sys.path)))
    environment = {"env_vars": {"PYTHONPATH": folders}}
    if address is not None:
        expect_answer(address)
        ray.init(address=address, **quiet)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=max(os.cpu_count() or 1, num_workers + 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        # Ray's sockets stand in it, and a socket's path has at most 107 characters.
        _temp_dir=folder,
        runtime_env=environment,
        **quiet,
    )


def expect_answer(address: str) -> None:
    """Check that something listens at `address`; Ray itself would wait for minutes.

    Raises:
        EngineError: nothing listens there, or it isn't an address.
    """
    place = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = place.hostname, place.port
        if host is None or port is None:
            raise ValueError("it has no host and port")
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise EngineError(f"no Ray cluster answers at {address}: {error}") from error


def said(error: Exception) -> str:
    """Return in one line the message of the first failed rank, or else Ray's."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, cause in sorted(failures.items()):
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return f"rank {rank} failed: {lines[-1] if lines else type(cause).__name__}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"Ray failed: {lines[-1] if lines else type(error).__name__}"


register_strategy(
    "ray",
    Torch,
    needs="ray",
    train=train_on_ray,
    run_script=run_script_on_ray,
    takes=("address",),
    **OF_DDP,
)
