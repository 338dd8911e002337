"""A training for --elastic: each rank writes down which samples it trained on.

One epoch of 1,440 samples, unless there are more steps, in global batches of 12: sample
i is in step i // 12.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import distlab.distributed as dist

NUM_STEPS, GLOBAL_BATCH = 120, 12


def main(folder: Path, num_steps: int = NUM_STEPS) -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = dist.elastic({"model": model, "optimizer": optimizer})
    with open(folder / f"ids.{os.getpid()}", "w", buffering=1) as file:
        for step in training.steps(num_steps):
            with step:
                rank, size = dist.get_rank(), dist.get_world_size()
                first = step.index * GLOBAL_BATCH
                ids = range(first + rank, first + GLOBAL_BATCH, size)
                inputs = torch.tensor([[float(i)] for i in ids]) / 1000
                loss = (model(inputs) - inputs).square().sum() * size / GLOBAL_BATCH
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not (folder / "fast").exists():
                    time.sleep(0.1)
            if training.completed == step.index + 1:
                file.write(" ".join(map(str, (step.index, size, rank, *ids))) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
