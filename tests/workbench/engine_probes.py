"""For engine_effects.py: a training that can be looked into."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import distlab.distributed as ours
from distlab.engines import History, PyTorchDDPTrainer

RATE, NUM_SAMPLES, BATCH = 0.5, 24, 8


class Net(torch.nn.Module):
    """Notes at each forward what it is part of; `idle` has no part in the outputs."""

    seen: ClassVar[list[dict[str, Any]]] = []
    newest: ClassVar[Net | None] = None

    def __init__(self, has_idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.idle = torch.nn.Linear(4, 4) if has_idle else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.layer(inputs))
        Net.newest = self
        Net.seen.append(
            {
                "is_sharded": isinstance(self, FSDPModule),
                "is_ours": ours.is_initialized(),
                "dtype": outputs.dtype,
                "device": outputs.device.type,
            }
        )
        return outputs


def loader(**more: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, 4)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return DataLoader(data, BATCH, **more)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def fit(val: Any = None, max_steps: int | None = None, **config: Any) -> History:
    trainer = PyTorchDDPTrainer(Net(), optimizer=sgd, verbose=False, **config)
    return trainer.fit(loader(), val, max_steps=max_steps)


def moved(**config: Any) -> torch.Tensor:
    """By how much the first step changes the weights."""
    model = Net()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    trainer = PyTorchDDPTrainer(model, optimizer=sgd, verbose=False, **config)
    trainer.fit(loader(), max_steps=1)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


def saved(folder: Path, **config: Any) -> Any:
    """The checkpoint of one epoch."""
    fit(checkpoint_dir=folder, **config)
    return torch.load(folder / "epoch_0001.pt", weights_only=True)
