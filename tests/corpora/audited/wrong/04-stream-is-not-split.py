"""An iterable dataset that knows nothing of ranks.

After https://github.com/huggingface/datasets/issues/5360
Finds: samples-repeated
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(11)
        for _ in range(32):
            yield torch.randn(4, generator=generator)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Lines(), batch_size=16 // dist.get_world_size())  # MISTAKE
    for batch in loader:
        loss = (model(batch) - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
