"""An ordinary training script that trains on the digits with this library.

torchrun --nproc-per-node 2 -m distlab.distributed.example --backend tcp

With --checkpoint DIR it saves after each epoch and continues from the newest one.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distlab.distributed as dist
from distlab.data.digits import load_digits_split
from distlab.models.mlp import make_mlp

LEARNING_RATE, GLOBAL_BATCH = 0.2, 64


class Trained(NamedTuple):
    """The result of a training: the mean loss of each epoch, and the held-out accuracy.

    `num_before` is the number of epochs that were trained before it continued from a
    checkpoint.
    """

    losses: list[float]
    accuracy: float
    weights: Tensor  # all parameters in a row
    num_before: int = 0

    @property
    def digest(self) -> str:
        """Hash the weights to eight hex digits, which are equal if all bits are."""
        return hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()[:8]


def make_loader() -> tuple[dist.DistributedSampler, DataLoader[Any]]:
    """Load this rank's shard of the digits, in batches of 1/n of the global batch."""
    digits = load_digits_split()
    data = TensorDataset(digits.train_inputs, digits.train_targets)
    sampler = dist.DistributedSampler(data, drop_last=True)
    size = max(1, GLOBAL_BATCH // dist.get_world_size())
    return sampler, DataLoader(data, size, sampler=sampler, drop_last=True)


def train(
    num_epochs: int = 3,
    on_epoch: Callable[[int, float], None] | None = None,
    checkpoint: str | None = None,
) -> Trained:
    """Train on the default group; `on_epoch` gets each epoch's number and mean loss.

    All ranks get the same losses and weights. If `checkpoint` names a folder, we train
    only for the epochs that remain.
    """
    digits, device = load_digits_split(), dist.default_comm().device
    sampler, loader = make_loader()

    model = dist.DistributedDataParallel(make_mlp(seed=dist.get_rank()).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, num_before = [], 0
    if checkpoint:
        num_before = dist.load_checkpoint(checkpoint, model, optimizer) or 0
    for epoch in range(num_before, num_epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs.to(device))
            loss = nn.functional.cross_entropy(outputs, targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = dist.all_reduce(total / len(loader), dist.ReduceOp.AVG)
        losses.append(float(mean))
        if checkpoint:
            dist.save_checkpoint(checkpoint, epoch + 1, model, optimizer)
        if on_epoch:
            on_epoch(epoch, losses[-1])
    with torch.no_grad():
        answers = model(digits.held_out_inputs.to(device)).argmax(1).cpu()
    accuracy = float((answers == digits.held_out_targets).double().mean())
    weights = [parameter.detach().cpu().flatten() for parameter in model.parameters()]
    return Trained(losses, accuracy, torch.cat(weights), num_before)


def say_epoch(epoch: int, loss: float) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}  training loss {loss:.4f}", flush=True)


def main() -> None:
    """Join the job that a launcher started, train, and let rank 0 print the result."""
    parser = argparse.ArgumentParser(description="train on the digits")
    parser.add_argument("--backend", help="such as gloo, nccl or tcp")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", help="a folder that all ranks share")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend, timeout_s=120)
    trained = train(arguments.epochs, say_epoch, arguments.checkpoint)
    device = dist.default_comm().device
    digests = dist.gather(torch.tensor(int(trained.digest, 16), device=device))
    if digests is not None:
        same = "the same" if len({int(d) for d in digests}) == 1 else "different"
        print(
            f"accuracy {trained.accuracy:.4f}; {same} weights on "
            f"{dist.get_world_size()} ranks: {trained.digest}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
