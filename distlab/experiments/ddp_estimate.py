"""How long a training will take, from a few steps of it in this process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from distlab.experiments.ddp import SECONDS_AN_HOUR
from distlab.experiments.ddp_config import DdpConfig
from distlab.experiments.ddp_data import Split, make_model, make_optimizer

_TRIES = 5  # steps; the first one is not counted
START_S = 0.5  # until the ranks have read the data


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`step_s` was measured without messages; more ranks than cores take turns."""

    num_steps: int
    step_s: float
    seconds: float
    world_size: int

    def cost(self, rate: float) -> float:
        """Workers × hours × what one worker costs an hour."""
        return self.world_size * self.seconds / SECONDS_AN_HOUR * rate


def estimate(config: DdpConfig, data: Split) -> Estimate:
    """Time a few steps on one rank's share of a batch, on one thread as a rank has."""
    num_samples = len(data.train_targets)
    per_epoch = -(-num_samples // config.global_batch_size)
    num_steps = per_epoch * config.epochs
    step_s = _step_s(config, data)
    rounds = max(1.0, config.world_size / (os.cpu_count() or 1))
    if config.device == "cuda":
        rounds = 1.0
    return Estimate(
        num_steps=num_steps,
        step_s=step_s,
        seconds=START_S + num_steps * step_s * rounds,
        world_size=config.world_size,
    )


def _step_s(config: DdpConfig, data: Split) -> float:
    size = min(config.samples_per_rank, len(data.train_targets))
    device = torch.device(config.device)
    model = make_model(config).to(device)
    optimizer = make_optimizer(config, model)
    inputs = data.train_inputs[:size].to(device)
    targets = data.train_targets[:size].to(device)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    took = []
    try:
        for _ in range(_TRIES):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            float(loss.detach())  # on a GPU, this waits for it
            took.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(num_threads)
    return min(took[1:])
