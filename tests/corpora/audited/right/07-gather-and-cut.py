"""Predictions are gathered in the sampler's order and cut to the true length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(30, 4), torch.randint(0, 2, (30,)))
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=3, sampler=sampler)
model = DDP(nn.Linear(4, 2)).eval()
hits = []
with torch.no_grad():
    for x, y in loader:
        hits.append((model(x).argmax(1) == y).float())
mine = torch.cat(hits)
everyone = [torch.empty_like(mine) for _ in range(world_size)]
dist.all_gather(everyone, mine)
in_order = torch.stack(everyone, dim=1).flatten()[: len(dataset)]
if dist.get_rank() == 0:
    print(f"accuracy {in_order.mean():.3f} of {len(in_order)}")
dist.destroy_process_group()
