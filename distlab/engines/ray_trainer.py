"""RayTrainer: a trainer that starts its ranks with Ray."""

from __future__ import annotations

from typing import Any

from distlab.engines.trainer import Trainer


class RayTrainer(Trainer):
    """Trains on the Ray cluster at `address`, or by default on a local one.

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
