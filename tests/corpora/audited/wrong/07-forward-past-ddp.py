"""Training calls the inner module, so that DDP never reduces a gradient.

After https://github.com/k2-fsa/icefall/issues/226
Finds: replicas-differ
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 10)
        self.decoder = nn.Linear(10, 6)

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def forward(self, x):
        return self.decoder(self.encode(x))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(Recognizer())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(5, 12, 6)
for batch in data:
    x = batch[rank::world_size]
    output = model.module(x)  # MISTAKE
    loss = nn.functional.mse_loss(output, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
