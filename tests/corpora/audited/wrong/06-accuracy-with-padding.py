"""The accuracy is taken over all that the sampler dealt out.

After https://github.com/pytorch/pytorch/issues/25162
Finds: padded-evaluation
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, dataset):
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    right, seen = 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            seen += len(y)
    totals = torch.tensor([right, seen], dtype=torch.float64)
    dist.all_reduce(totals)  # MISTAKE
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = DDP(nn.Linear(7, 4))
    held_out = TensorDataset(torch.randn(30, 7), torch.randint(0, 4, (30,)))
    accuracy = evaluate(model, held_out)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}")
    dist.destroy_process_group()


main()
