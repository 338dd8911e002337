"""Run one rank of Horovod.

Its optimizer sends each gradient as soon as backward() has it, and step() waits for all
of them.

Source: Horovod's documentation, "Horovod with PyTorch".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.config import DistributedConfig
from distlab.engines.optimizers import Make, make_optimizer
from distlab.engines.outside import engine
from distlab.engines.parallel import Parallel, make_scaler
from distlab.engines.torch_engine import device_of_rank

HOW = "make test-horovod builds it in .venv-horovod"


class Horovod(Parallel):
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
        """Implement `Parallel.step`; we clip once all gradients have arrived."""
        optimizer: Any = self.optimizer
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            return super().step()

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Parallel.sum`."""
        return self.hvd.allreduce_(tensor, op=self.hvd.Sum)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Implement `Parallel.close`."""
        if self.owns_group:
            self.hvd.shutdown()
