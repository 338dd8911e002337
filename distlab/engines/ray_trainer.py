"""RayTrainer: the trainer whose ranks Ray starts."""

from __future__ import annotations

from typing import Any

from distlab.engines.trainer import Trainer


class RayTrainer(Trainer):
    """Trains on a Ray cluster; without `address` on one of this machine's own.

    Example: `RayTrainer(model, {"num_gpus": 2, "epochs": 3}).fit(train_loader)`
    """

    backends = ("ray",)

    def __init__(
        self,
        model: Any,
        config: dict[str, Any] | None = None,
        *,
        address: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, **{**(config or {}), **more})
        self.address = address
