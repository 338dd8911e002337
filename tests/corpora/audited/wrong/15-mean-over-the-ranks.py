"""Each rank's mean loss counts the same, although the last rank has fewer samples.

After https://github.com/ORNL/HydraGNN/pull/116
Finds: mean-of-means
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(9)
dataset = TensorDataset(torch.randn(26, 4), torch.randn(26, 2))
model = nn.Linear(4, 2)
mine = Subset(dataset, range(rank, len(dataset), world_size))
loss, batches = 0.0, 0
with torch.no_grad():
    for x, y in DataLoader(mine, batch_size=4):
        loss += nn.functional.mse_loss(model(x), y).item()
        batches += 1
mean = torch.tensor(loss / batches)  # MISTAKE
dist.all_reduce(mean)  # MISTAKE
if rank == 0:
    print("validation loss", mean.item() / world_size)
dist.destroy_process_group()
