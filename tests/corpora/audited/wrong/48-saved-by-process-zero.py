"""Process zero alone asks FSDP for the model's state.

After https://github.com/huggingface/transformers/pull/10596
Finds: save-needs-all
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def is_world_process_zero():
    return dist.get_rank() == 0


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = FSDP(
        layers,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(2, 8, 4):
        x = batch[rank::world_size]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    if is_world_process_zero():
        torch.save(model.state_dict(), io.BytesIO())  # MISTAKE
    dist.destroy_process_group()


main()
