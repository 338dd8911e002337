"""Train on the digits on one rank with `distlab.distributed`, as any script would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import distlab.distributed as dist
from distlab.curriculum.choose import OVERRIDE
from distlab.distributed import example, parts
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import RankContext

PATIENCE_S = 600.0  # many ranks on few cores take long, and are not stuck


def train_as_rank(
    context: RankContext, num_epochs: int, code: str, root: str
) -> dict[str, Any]:
    """Run the whole training over plain sockets; `code` is mine or reference.

    `root` is the course's folder.
    """
    if code == "reference":
        os.environ[OVERRIDE] = code
    parts.forget("mine", Path(root))  # a rank works in a folder of its own
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group("tcp", timeout_s=PATIENCE_S)

    def on_epoch(epoch: int, loss: float) -> None:
        if context.rank == 0:
            context.report({"epoch": epoch, "loss": loss})

    trained = example.train(num_epochs, on_epoch)
    sampler, loader = example.make_loader()
    batches = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        size = loader.batch_size or 1
        drawn = list(sampler)
        last = len(drawn) - len(drawn) % size
        batches.append([drawn[k : k + size] for k in range(0, last, size)])
    dist.destroy_process_group()
    return {
        "losses": trained.losses,
        "accuracy": trained.accuracy,
        "weights": trained.weights,
        "batches": batches,
    }
