"""A plain FSDP2 script, which knows nothing of distlab: load, train, save with DCP.

    torchrun --nproc-per-node 4 fsdp2_script.py --optimizer adamw --load A --save B

Each step, the ranks share one batch of 12 samples; rank 0 prints the losses.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_SAMPLES, BATCH = 24, 12
"""So that an epoch has two steps, and 2, 3 and 4 ranks get equal parts of a batch."""


class Net(nn.Module):
    """Has a buffer, batch norm, a frozen layer, a shared weight and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.middle, self.again = nn.Linear(5, 5), nn.Linear(5, 5)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.idle = nn.Linear(2, 2)
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.double()
        self.norm.eval()  # its statistics would depend on the number of ranks

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        hidden = self.again(self.middle(hidden).tanh())
        scale: Any = self.scale
        outputs: Tensor = self.head(self.frozen(hidden).tanh()) * scale
        return outputs


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.double)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def make_optimizer(kind: str, model: Any) -> torch.optim.Optimizer:
    """Make two groups with their own settings; they include what is frozen."""
    body = [*model.first.parameters(), *model.norm.parameters()]
    known = {id(p) for p in body}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": body, "lr": 0.02}, {"params": rest, "lr": 0.05}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, weight_decay=0.01)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, mesh = Net(), init_device_mesh("cpu", (size,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(args.optimizer, model)
    progress = {"step": 0, "epoch": 0}
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "distlab": progress}
        load(state, checkpoint_id=args.load)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments
        )
    inputs, targets = samples()
    losses = []
    for _ in range(args.steps):
        first = progress["step"] * BATCH % NUM_SAMPLES
        own = slice(first + rank, first + BATCH, size)
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / size)
        progress["step"] += 1
        progress["epoch"] = progress["step"] * BATCH // NUM_SAMPLES
    if args.save:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "distlab": progress}
        save(state, checkpoint_id=args.save)
    if rank == 0:
        print(json.dumps({"losses": losses, **progress}), flush=True)
    dist.barrier()
    # On a busy machine, a thread of gloo sometimes aborts a process that ends normally.
    os._exit(0)


if __name__ == "__main__":
    main()
