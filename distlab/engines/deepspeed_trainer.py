"""Train with DeepSpeed's ZeRO stages 0 to 3 in ranks that distlab.launch starts."""

from __future__ import annotations

from distlab.engines.trainer import Trainer


class DeepSpeedTrainer(Trainer):
    """Trains with DeepSpeed's engine.

    `deepspeed_config` is DeepSpeed's configuration, as a dictionary or a JSON file. You
    don't have to repeat its settings for batches, precision, clipping, the stage, the
    optimizer and the scheduler.

    Example: `DeepSpeedTrainer(model, num_gpus=2, zero_stage=3).fit(train_loader)`
    """

    backends = ("deepspeed",)
