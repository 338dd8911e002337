"""A warm-up phase and a main phase, and neither tells the sampler its epoch.

After https://github.com/BatsResearch/taglets/pull/28
Finds: set-epoch
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainable:
    def __init__(self, dataset, batch_size):
        self.model = DDP(nn.Linear(4, 2))
        sampler = DistributedSampler(dataset)
        self.loader = DataLoader(
            dataset,
            batch_size=batch_size // dist.get_world_size(),
            sampler=sampler,
            num_workers=1,
            persistent_workers=True,
        )

    def run(self, num_epochs, lr):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        for _ in range(num_epochs):  # MISTAKE
            for x, y in self.loader:  # MISTAKE
                optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                optimizer.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
images = TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
task = Trainable(images, batch_size=12)
task.run(1, lr=0.01)
task.run(1, lr=0.1)
dist.destroy_process_group()
