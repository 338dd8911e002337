"""Rank 1 fails, and the handler wants to broadcast the name of a last checkpoint.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/6430
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def training_step(step: int) -> torch.Tensor:
    if rank == 1 and step == 5:
        raise ValueError("a label is out of range")
    return torch.randn(32)


try:
    for step in range(10):
        grad = training_step(step)
        dist.all_reduce(grad)  # HERE 0: all_reduce
except ValueError:
    name = [f"last-{rank}.ckpt"]
    dist.broadcast_object_list(name, src=0)  # HERE 1: broadcast
    print("saved", name[0])
    raise
dist.destroy_process_group()
