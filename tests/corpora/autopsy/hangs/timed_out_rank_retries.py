"""Rank 1 retries its batch with half the size, and so reduces twice.

Report: https://github.com/mosaicml/composer/pull/1690
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def train_batch(batch: torch.Tensor, microbatches: int) -> None:
    for part in batch.chunk(microbatches):
        grad = part.mean(0)
        dist.all_reduce(grad)  # HERE 1: all_reduce


for step in range(5):
    too_large = rank == 1 and step == 3
    train_batch(torch.randn(8, 4), microbatches=2 if too_large else 1)
samples = torch.tensor([40])
dist.broadcast(samples, src=0)  # HERE 0: broadcast
dist.destroy_process_group()
