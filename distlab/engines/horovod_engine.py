"""Horovod: the same worker in processes that horovodrun starts.

    fit() ─▶ horovodrun ─▶ rank.py in each process ─▶ train(job) ─▶ a file ─▶ fit()

Horovod's last release is of 2023 and does not build against today's torch as it is:
`make test-horovod` builds it for C++20. Use it to move old code, not to write new.

Source: Horovod's documentation, "Horovod with PyTorch" and "Run Horovod".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines import rank as ranks
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.horovod_parallel import HOW
from distlab.engines.outside import engine
from distlab.engines.trainer import Trainer

GRACE_S = 10.0


class HorovodTrainer(Trainer):
    """Trains with Horovod; under horovodrun, fit() takes part in that job.

    `loss_fn(outputs, targets)` is a mean over the samples. `timeline`: a file for
    Horovod's own record of what it sent when, in the format of chrome://tracing.

    Example: `HorovodTrainer(model, num_gpus=2, compression="fp16").fit(train_loader)`
    """

    backends = ("horovod",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        verbose: bool = True,
        *,
        timeline: str | Path | None = None,
        **config: Any,
    ) -> None:
        own: dict[str, Any] = {"optimizer": optimizer, "loss": loss_fn}
        super().__init__(model, verbose=verbose, **own, **config)
        self.timeline = timeline
        self.starter = self._start

    def _start(self, folder: Path, config: DistributedConfig) -> int:
        command = [sys.executable, ranks.__file__, str(folder)]
        return horovodrun(command, config, folder / "launch.txt", self.timeline)

    @staticmethod
    def metric_average(value: float, name: str) -> float:
        """The mean of a value over the ranks; all call it with the same name."""
        hvd = engine("horovod.torch", "horovod", HOW)
        if not hvd.is_initialized():
            return float(value)
        own = torch.tensor(float(value), dtype=torch.double)
        return float(hvd.allreduce(own, name=name, op=hvd.Average))


def run_script_on_horovod(
    script: Path, arguments: Sequence[str], config: DistributedConfig, log_dir: Path
) -> int:
    """Run a user's script as every rank; the exit code.

    Raises:
        EngineError: Horovod is not installed, or there are several nodes.
    """
    expect_one_node(config)
    engine("horovod.torch", "horovod", HOW)
    said = log_dir / "horovodrun.txt"
    code = horovodrun([sys.executable, str(script), *arguments], config, said)
    if code:
        sys.stderr.write(said.read_text(encoding="utf-8", errors="replace"))
    return code


def horovodrun(
    command: Sequence[str],
    config: DistributedConfig,
    said: Path,
    timeline: str | Path | None = None,
) -> int:
    """Run `command` as every rank on this machine; what fails is written to `said`.

    Raises:
        EngineError: Horovod is not installed.
    """
    engine("horovod.torch", "horovod", HOW)
    num_ranks = config.world_size
    run = [sys.executable, "-m", "horovod.runner.launch", "--gloo", f"-np={num_ranks}"]
    run += ["-H", f"localhost:{num_ranks}"]
    if timeline is not None:
        run += ["--timeline-filename", str(Path(timeline).resolve())]
    folders = os.pathsep.join(map(os.path.abspath, sys.path))
    # Several ranks on one machine: as many threads each as torchrun gives them.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": folders}
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([*run, *command], env=environment, stderr=file)
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # it ends its ranks
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def expect_one_node(config: DistributedConfig) -> None:
    """Refuse what horovodrun would need ssh for.

    Raises:
        EngineError: the job has several nodes.
    """
    if config.num_nodes > 1:
        raise EngineError(
            f"num_nodes is {config.num_nodes}: start the script with horovodrun -H "
            "node0:…,node1:…, and it takes part"
        )
