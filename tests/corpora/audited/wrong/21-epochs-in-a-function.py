"""The epoch's number never reaches the sampler that is inside the loader.

After https://github.com/kan-bayashi/ParallelWaveGAN/issues/177
Finds: set-epoch
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, count):
        self.phases = torch.linspace(0, 3, count)

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, index):
        times = torch.arange(16) / 16
        return {"audio": torch.sin(6.28 * times + self.phases[index]), "id": index}


def train_epoch(model, loader, optimizer):
    model.train()
    for batch in loader:  # MISTAKE
        audio = batch["audio"]
        loss = nn.functional.l1_loss(model(audio), audio)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = Waves(60)
    sampler = DistributedSampler(dataset, seed=args.seed)
    size = args.batch_size // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    epoch = 0
    while epoch < args.epochs:  # MISTAKE
        train_epoch(model, loader, optimizer)  # MISTAKE
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    main(parser.parse_args())
