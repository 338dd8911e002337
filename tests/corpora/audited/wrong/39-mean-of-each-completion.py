"""Masked means of completions, accumulated with a fixed divisor.

After https://github.com/ml-explore/mlx-lm/pull/1413
Finds: token-weights
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, STEPS = 13, 2


def default_loss(model, tokens, lengths):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs)
    mask = torch.arange(targets.shape[1])[None] < lengths[:, None]
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none"
    )
    return (losses * mask).sum() / mask.sum()  # MISTAKE


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (32, 10))
    lengths = torch.randint(2, 9, (32,))
    model = DDP(nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    per_rank = 8 // world_size
    for start in range(0, 32, 16):
        optimizer.zero_grad()
        for micro in range(STEPS):
            first = start + micro * 8 + rank * per_rank
            rows = slice(first, first + per_rank)
            loss = default_loss(model, tokens[rows], lengths[rows])
            (loss / STEPS).backward()  # MISTAKE
        optimizer.step()
    dist.destroy_process_group()


main()
