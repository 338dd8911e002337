"""A hand-written communication hook: all_reduce, then a division in a callback.

Ranks: 4
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def average(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    size = dist.get_world_size()
    return work.get_future().then(lambda future: future.value()[0] / size)


dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
model.register_comm_hook(None, average)
for _ in range(4):
    model(torch.randn(4, 64)).sum().backward()
dist.destroy_process_group()
