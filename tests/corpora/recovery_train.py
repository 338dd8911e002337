"""The training of recovery_jobs.py: the digits, and a stamp for each step.

    recovery_train.py STEPS FOLDER

Each rank writes `FOLDER/stamps/<rank>.<pid>`: a line for each completed step, with its
time. Where FOLDER/checkpoints is, it saves there. A step takes 10 ms longer as long as
FOLDER/slow is there, or the seconds that it names; what is computed does not change.
Rank 0 writes the digest of the weights to FOLDER/digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import distlab.distributed as dist
from distlab.data.digits import load_digits_split
from distlab.models.mlp import make_mlp

GLOBAL_BATCH, SAVE_EVERY, PAUSE_S = 48, 100, 0.01


def main(num_steps: int, folder: Path) -> None:
    """Train, and stamp each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout_s=60)
    digits = load_digits_split()
    model = dist.DistributedDataParallel(make_mlp(seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = folder / "checkpoints"
    saves = checkpoints.is_dir()
    training = dist.elastic(
        {"model": model, "optimizer": optimizer},
        folder=checkpoints if saves else None,
        save_every=SAVE_EVERY if saves else None,
    )
    order = torch.randperm(
        len(digits.train_inputs), generator=torch.Generator().manual_seed(0)
    )
    num_batches = len(order) // GLOBAL_BATCH
    (folder / f"ready.{os.getpid()}").touch()
    stamps = None
    for step in training.steps(num_steps):
        before = training.completed
        with step:
            batch = step.index % num_batches * GLOBAL_BATCH
            ids = order[batch : batch + GLOBAL_BATCH]
            own = ids[dist.get_rank() :: dist.get_world_size()]
            with contextlib.suppress(FileNotFoundError):
                time.sleep(float((folder / "slow").read_text() or PAUSE_S))
            optimizer.zero_grad()
            outputs = model(digits.train_inputs[own])
            nn.functional.cross_entropy(outputs, digits.train_targets[own]).backward()
            optimizer.step()
        if training.completed == before + 1:
            if stamps is None:
                name = f"{dist.get_rank()}.{os.getpid()}"
                stamps = open(folder / "stamps" / name, "w", buffering=1)  # noqa: SIM115
            stamps.write(f"{training.completed} {time.monotonic()}\n")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if dist.get_rank() == 0:
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        (folder / "digest").write_text(digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
