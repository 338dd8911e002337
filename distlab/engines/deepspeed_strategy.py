"""Run one rank of DeepSpeed's engine, with ZeRO stages 0 to 3.

zero_stage    what DeepSpeed shards
0             nothing
1             optimizer state
2             and gradients
3             and parameters

It keeps parameters and optimizer state in float32. On its first run, it compiles some
of its code with gcc, which takes about a minute.

Source: DeepSpeed's documentation, "Configuration JSON" and "Training API".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.engines.config import DistributedConfig
from distlab.engines.deepspeed_config import rest_of
from distlab.engines.expect import expect_float32
from distlab.engines.optimizers import Make, make_optimizer
from distlab.engines.outside import engine
from distlab.engines.strategies import register_strategy
from distlab.engines.torch_strategy import InDefaultGroup


class DeepSpeed(InDefaultGroup):
    """A rank of torch's default group that runs DeepSpeed's engine.

    Raises:
        EngineError: DeepSpeed isn't installed, or the model isn't in float32.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Make | None,
    ) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.deepspeed = engine("deepspeed", "deepspeed")
        expect_float32("backend deepspeed", model)
        super().__init__(config, model)
        with self.left_on_error():
            self.optimizer = make_optimizer(model, optimizer)
            self.engine, *_ = self.deepspeed.initialize(
                model=self.module, optimizer=self.optimizer, config=settings(config)
            )
        self.forward = self.engine

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Implement `Strategy.no_sync`, though stages 2 and 3 send each microbatch."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Implement `Strategy.backward`."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        """Implement `Strategy.step`; with stage 0, gradients are whole and we clip."""
        if self.config.stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        norm = self.clip(self.config.gradient_clipping)
        self.engine.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Implement `Strategy.weights`."""
        if self.config.stage < 3:
            return super().weights()
        with self.deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            return super().weights()

    def close(self) -> None:
        """Implement `Strategy.close`, after all ranks have ended their collectives."""
        dist.barrier()
        self.engine.destroy()
        super().close()


def settings(config: DistributedConfig) -> dict[str, Any]:
    """Build DeepSpeed's configuration from our fields and deepspeed_config."""
    given = config.deepspeed_config
    more = rest_of(given) if isinstance(given, dict) else {}
    clipping = config.gradient_clipping if config.stage else None  # see DeepSpeed.step
    own: dict[str, Any] = {
        "gradient_clipping": clipping or 0.0,  # unless told, DeepSpeed clips at 1.0
        "train_micro_batch_size_per_gpu": config.batch_size or 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_allow_untested_optimizer": True,
    }
    zero = {**more.get("zero_optimization", {}), "stage": config.stage}
    return {**own, **more, "zero_optimization": zero}


NO_CHECKPOINTS = (
    "backend deepspeed saves no checkpoints here: leave checkpoint_dir and "
    "resume_from_checkpoint out, or choose fsdp2"
)
register_strategy(
    "deepspeed",
    DeepSpeed,
    needs="deepspeed",
    precisions=("bf16",),
    zero_stages=(0, 1, 2, 3),
    takes=("deepspeed_config",),
    implied_by=("deepspeed_config",),
    refusals={
        "checkpoint_dir": NO_CHECKPOINTS,
        "resume_from_checkpoint": NO_CHECKPOINTS,
    },
)
