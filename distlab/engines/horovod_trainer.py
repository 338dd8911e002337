"""HorovodTrainer: a trainer that starts its ranks with horovodrun."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.horovod_strategy import HOW, start_with_horovodrun
from distlab.engines.outside import engine
from distlab.engines.trainer import Trainer

COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}


class HorovodTrainer(Trainer):
    """Trains with Horovod; if horovodrun started this process, fit() joins its job.

    `loss_fn(outputs, targets)` must return a mean over the samples. `timeline` names a
    file for Horovod's log of its messages, in the format of chrome://tracing.
    `compression` also accepts Horovod's own classes, such as `hvd.Compression.fp16`.

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
        compression = config.get("compression")
        if isinstance(compression, type):
            config["compression"] = COMPRESSORS.get(compression.__name__, compression)
        super().__init__(model, verbose=verbose, **own, **config)
        self.timeline = timeline
        self.starter = partial(start_with_horovodrun, timeline=timeline)

    @staticmethod
    def metric_average(value: float, name: str) -> float:
        """Average a value over the ranks, which must all call it with this name."""
        hvd = engine("horovod.torch", "horovod", HOW)
        if not hvd.is_initialized():
            return float(value)
        own = torch.tensor(float(value), dtype=torch.double)
        return float(hvd.allreduce(own, name=name, op=hvd.Average))
