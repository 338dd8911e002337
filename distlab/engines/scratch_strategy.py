"""The engine built from the course's own units: distlab.distributed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import distlab.distributed as ours
from distlab.engines.config import DistributedConfig
from distlab.engines.optimizers import Make, make_optimizer
from distlab.engines.strategies import register_strategy
from distlab.engines.strategy import Strategy, make_scaler

TIMEOUT_S = 600.0


class Scratch(Strategy):
    """A rank of distlab.distributed's default group, which it creates if necessary."""

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Make | None,
    ) -> None:
        super().__init__(config)
        self.owns_group = not ours.is_initialized()
        if self.owns_group and "RANK" in os.environ:
            ours.init_process_group("gloo", timeout_s=TIMEOUT_S)
        elif self.owns_group:
            ours.init_process_group("gloo", world_size=1, rank=0, timeout_s=TIMEOUT_S)
        self.rank, self.world_size = ours.get_rank(), ours.get_world_size()
        self.device = ours.default_comm().device
        self.module = model.to(self.device)
        self.optimizer = make_optimizer(model, optimizer)
        self.ddp = ours.DistributedDataParallel(
            model, find_unused_parameters=config.find_unused_parameters
        )
        self.forward = self.ddp
        self.scaler = make_scaler(config, self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Implement `Strategy.no_sync`."""
        with self.ddp.no_sync():
            yield

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum`."""
        return ours.all_reduce(tensor)

    def close(self) -> None:
        """Implement `Strategy.close`."""
        if self.owns_group:
            ours.destroy_process_group()


register_strategy(
    "scratch",
    Scratch,
    communication_backends=("gloo",),
    takes=("find_unused_parameters",),
    refusals={"communication_backend": "backend scratch runs on gloo, not on nccl"},
    trains_loss=True,
    keeps_optimizer=True,
)
