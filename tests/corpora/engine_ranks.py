"""Trainings on the engines of the core, one after the other in the same ranks."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import distlab.distributed as ours
from distlab.data.digits import load_digits_split
from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.start import take_part
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, Limits, RankContext
from tests.corpora.both_ways import leave, meet

NUM_SAMPLES, BATCH = 163, 16  # 11 steps an epoch, the last of 3 samples
LEARNING_RATE = 0.2
LIMITS = Limits(seconds=500.0, memory_bytes=8 << 30)


def loaders(num_samples: int = NUM_SAMPLES) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Some of the digits in float64 to train on, and others to validate with."""
    digits = load_digits_split()
    train = TensorDataset(
        digits.train_inputs[:num_samples], digits.train_targets[:num_samples]
    )
    held_out = TensorDataset(digits.held_out_inputs, digits.held_out_targets)
    return DataLoader(train, BATCH, shuffle=True), DataLoader(held_out, 50)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD: unlike Adam it shows a sum that should have been a mean."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with a state that a checkpoint must hold."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE / 4, momentum=0.9)


def trained(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Train on the digits as one of the ranks; what came of it."""
    given = {"verbose": False, "epochs": 2, "batch_size": BATCH // world_size, **case}
    max_steps = given.pop("max_steps", None)
    validates = given.pop("validates", False)
    named = {"momentum": momentum}.get(given.pop("optimizer", ""), sgd)
    train, val = loaders(given.pop("num_samples", NUM_SAMPLES))
    trainer = PyTorchDDPTrainer(make_mlp(), optimizer=named, **given)
    trainer.runs_jobs_with = take_part
    history = trainer.fit(train, val if validates else None, max_steps=max_steps)
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return {**asdict(history), "weights": weights}


def play_cases(
    context: RankContext, folder: str, port: int, cases: list[dict[str, Any]]
) -> list[dict[str, Any] | str]:
    """All cases on these ranks, or what one was refused with."""
    meet(context, folder)
    ours.init_process_group(
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=context.world_size,
        rank=context.rank,
        timeout_s=120,
    )
    results: list[dict[str, Any] | str] = []
    for case in cases:
        try:
            results.append(trained(case, context.world_size))
        except EngineError as error:
            results.append(str(error))
    ours.destroy_process_group()
    leave()
    return results


def on_ranks(
    cluster: Cluster, world_size: int, cases: list[dict[str, Any]]
) -> list[Any]:
    """By case, what each rank gives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        run = cluster.run(
            play_cases, world_size, folder, port, cases, limits=LIMITS, journal=False
        )
    return list(zip(*run.require_finished().values, strict=True))
