"""All ranks skip the same layers: one number for all, and DDP looks for unused ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(1).item() > 0.3:
                x = x + layer(x)
        return x * self.scale if hasattr(self, "scale") else x + 0 * self.layers[0](x)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
model = DDP(Skipping(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for batch in torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0)):
    x = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), 2 * x).backward()
    optimizer.step()
dist.destroy_process_group()
