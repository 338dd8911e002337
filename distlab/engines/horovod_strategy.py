"""Train with Horovod, in processes that horovodrun starts.

    fit() ─▶ horovodrun ─▶ rank.py in each process ─▶ train(job) ─▶ a file ─▶ fit()

Its optimizer sends each gradient as soon as backward() has it, and step() waits for all
of them. Horovod's last release is from 2023 and doesn't build against today's torch as
it is, so `make test-horovod` builds it for C++20. Use it to migrate old code, not to
write new.

Source: Horovod's documentation, "Horovod with PyTorch" and "Run Horovod".
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines import rank as ranks
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.optimizers import Make, make_optimizer
from distlab.engines.outside import end, engine, environment_of_ranks
from distlab.engines.strategies import register_strategy
from distlab.engines.strategy import Strategy, make_scaler
from distlab.engines.torch_strategy import device_of_rank

HOW = "make test-horovod builds it in .venv-horovod"


class Horovod(Strategy):
    """A rank of Horovod's group, which it creates if there is none."""

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Make | None,
    ) -> None:
        super().__init__(config)
        self.hvd = hvd = engine("horovod.torch", "horovod", HOW)
        self.owns_group = not hvd.is_initialized()
        if self.owns_group:
            hvd.init()
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.device = device_of_rank(config.communication_backend, hvd.local_rank())
        self.module = self.forward = model.to(self.device)
        state = model.state_dict().items()  # also what get_extra_state() returns
        tensors = {name: v for name, v in state if isinstance(v, Tensor)}
        hvd.broadcast_parameters(tensors, root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(
            make_optimizer(model, optimizer),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, config.compression),
            backward_passes_per_step=config.gradient_accumulation_steps,
            op=hvd.Average,
        )
        self.scaler = make_scaler(config, self.device)

    def step(self) -> float:
        """Implement `Strategy.step`; we clip once all gradients have arrived."""
        optimizer: Any = self.optimizer
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            return super().step()

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum`."""
        return self.hvd.allreduce_(tensor, op=self.hvd.Sum)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Implement `Strategy.close`."""
        if self.owns_group:
            self.hvd.shutdown()


def start_with_horovodrun(
    folder: Path, config: DistributedConfig, timeline: str | Path | None = None
) -> int:
    """Run rank.py with a folder on all ranks; return the exit code."""
    command = [sys.executable, ranks.__file__, str(folder)]
    return horovodrun(command, config, folder / "launch.txt", timeline)


def run_script_on_horovod(
    script: Path,
    arguments: Sequence[str],
    config: DistributedConfig,
    *,
    log_dir: Path | None,
    address: str | None = None,
) -> int:
    """Run a user's script as every rank; return the exit code.

    Raises:
        EngineError: Horovod isn't installed, or there are several nodes.
    """
    expect_one_node(config)
    engine("horovod.torch", "horovod", HOW)
    said = (log_dir or Path()) / "horovodrun.txt"
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
    """Run `command` as every rank on this machine; write failures to `said`.

    Raises:
        EngineError: Horovod isn't installed.
    """
    engine("horovod.torch", "horovod", HOW)
    num_ranks = config.world_size
    run = [sys.executable, "-m", "horovod.runner.launch", "--gloo", f"-np={num_ranks}"]
    run += ["-H", f"localhost:{num_ranks}"]
    if timeline is not None:
        run += ["--timeline-filename", str(Path(timeline).resolve())]
    environment = environment_of_ranks()
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([*run, *command], env=environment, stderr=file)
        try:
            return process.wait()
        except BaseException:
            end(process)  # it ends its ranks
            raise


def expect_one_node(config: DistributedConfig) -> None:
    """Refuse several nodes, for which horovodrun would need ssh.

    Raises:
        EngineError: the job has several nodes.
    """
    if config.num_nodes > 1:
        raise EngineError(
            f"num_nodes is {config.num_nodes}: start the script with horovodrun -H "
            "node0:…,node1:…, and it takes part"
        )


register_strategy(
    "horovod",
    Horovod,
    needs="horovod.torch",
    install=HOW,
    start_ranks=start_with_horovodrun,
    run_script=run_script_on_horovod,
    rank_variable="HOROVOD_RANK",
    world_size_variable="HOROVOD_SIZE",
    communication_backends=("gloo",),
    compressions=("none", "fp16"),
    refusals={
        "communication_backend": (
            "backend horovod sends as it was built: leave communication_backend out"
        )
    },
)
