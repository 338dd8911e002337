"""Predictions of all ranks are gathered, and the repeated ones stay in.

After https://github.com/roboflow/rf-detr/issues/1507
Finds: padded-evaluation
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def predict(model, loader):
    guesses, truth = [], []
    for x, y in loader:
        guesses.append(model(x).argmax(1))
        truth.append(y)
    return torch.cat(guesses), torch.cat(truth)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    images = TensorDataset(torch.randn(21, 6), torch.randint(0, 3, (21,)))
    model = DDP(nn.Linear(6, 3))
    sampler = DistributedSampler(images, shuffle=False)
    loader = DataLoader(images, batch_size=2, sampler=sampler)
    mine = predict(model, loader)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, mine)  # MISTAKE
    guesses = torch.cat([guess for guess, _ in states])  # MISTAKE
    truth = torch.cat([label for _, label in states])  # MISTAKE
    accuracy = (guesses == truth).float().mean()  # MISTAKE
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f} of {len(truth)}")
    dist.destroy_process_group()


main()
