"""The trainings of test_dcp_ranks.py: those of distlab, and the script of FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distlab.distributed as dist
from distlab.distributed.parts import unit
from distlab.engines import History, PyTorchDDPTrainer
from distlab.runner import RankContext
from tests.workbench import fsdp2_script
from tests.workbench.distributed_ranks import begin
from tests.workbench.fsdp2_script import (
    BATCH,
    NUM_SAMPLES,
    Net,
    make_optimizer,
    samples,
)

PER_EPOCH = NUM_SAMPLES // BATCH


def fsdp2(n: int, *arguments: Any) -> dict[str, Any]:
    """Run the script of FSDP2 on n ranks; what it has printed."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(n)]
    command += [fsdp2_script.__file__, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said


def on_engine(n: int, kind: str, epochs: int, **config: Any) -> History:
    """Train with an engine, in its processes if n > 1."""
    model = Net()
    if config.get("backend") != "fsdp2":
        config["find_unused_parameters"] = True
    trainer = PyTorchDDPTrainer(
        model,
        optimizer=make_optimizer(kind, model),
        num_gpus=n,
        epochs=epochs,
        verbose=False,
        **config,
    )
    return trainer.fit(DataLoader(TensorDataset(*samples()), BATCH // n))


def _zero(kind: str, model: nn.Module, stage: int) -> Any:
    plain = make_optimizer(kind, model)
    groups = [{"params": g["params"], "lr": g["lr"]} for g in plain.param_groups]

    def make(shards: Any) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(shards, weight_decay=0.01)
        return torch.optim.SGD(shards, lr=0.05, momentum=0.9)

    lesson = unit("sharded_optimizer")
    optimizer = lesson.ShardedOptimizer(dist.default_comm(), model, groups, make)
    if stage == 2:
        lesson.ShardedGradients(optimizer)
    return optimizer


def of_library(
    context: RankContext,
    kind: str,
    stage: int,
    num_steps: int,
    load: str,
    save: str,
    checkpoint_format: str,
) -> tuple[list[float], int]:
    """Train with distlab.distributed on one rank; the losses, and the last step."""
    rank, size = begin(context)
    model: Any = Net()
    optimizer: Any
    if stage:
        optimizer = _zero(kind, model, stage)
    else:
        optimizer = make_optimizer(kind, model)
        model = dist.DistributedDataParallel(model, find_unused_parameters=True)
    step = (dist.load_checkpoint(load, model, optimizer) or 0) if load else 0
    inputs, targets = samples()
    losses = []
    for _ in range(num_steps):
        first = step * BATCH % NUM_SAMPLES
        own = slice(first + rank, first + BATCH, size)
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(dist.all_reduce(loss.detach().clone())) / size)
        step += 1
    if save:
        dist.save_checkpoint(
            save, step, model, optimizer, checkpoint_format=checkpoint_format
        )
    return losses, step
