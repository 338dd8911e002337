"""Estimate how long a training will take, from a few of its steps and messages."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from distlab.cost import cost_of
from distlab.runner import Cluster, Limits, RankContext
from distlab.training.ddp_config import DdpConfig
from distlab.training.ddp_data import Split, make_model, make_optimizer

_PATIENCE_S = 60.0
_MEMORY_BYTES = 4096 << 30  # CUDA reserves addresses
_TRIES = 5  # steps; the first one is not counted
_ROUNDS = 12  # of messages
START_S = 0.5  # until the ranks have read the data, where nothing was measured


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The seconds that ranks need to start, and for the messages of one step."""

    start_s: float
    messages_s: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated duration; if there are more ranks than cores, they take turns.

    `step_s` was measured without messages. Without a probe, `messages_s` is None and
    `seconds` is a lower bound.
    """

    num_steps: int
    step_s: float
    messages_s: float | None
    start_s: float
    seconds: float
    world_size: int

    def cost(self, rate: float) -> float:
        """Return workers × hours × the price of one worker per hour."""
        return cost_of(self.world_size, self.seconds, rate)


def probe(cluster: Cluster, config: DdpConfig, *, journal: bool = False) -> Probe:
    """Start the ranks once, and let them average as many numbers as in the gradients.

    Raises:
        RunnerError: the ranks didn't finish.
    """
    sizes = [parameter.numel() for parameter in make_model(config).parameters()]
    run = cluster.run(
        messages_as_rank,
        config.world_size,
        sizes,
        backend=config.backend,
        journal=journal,
        limits=Limits(seconds=_PATIENCE_S, memory_bytes=_MEMORY_BYTES),
    ).require_finished()
    started = run.seconds - max(value["seconds"] for value in run.values)
    return Probe(
        start_s=max(0.0, started),
        messages_s=max(value["round_s"] for value in run.values),
    )


def messages_as_rank(context: RankContext, sizes: Sequence[int]) -> dict[str, float]:
    """Time the messages of a step: a sum for each parameter, and one number."""
    comm = context.comm
    tensors = [torch.zeros(size, device=comm.device) for size in (1, *sizes)]
    began, took = time.perf_counter(), []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for tensor in tensors:
            comm.all_reduce(tensor)
        took.append(time.perf_counter() - started)
    return {
        "round_s": statistics.mean(took[1:]),
        "seconds": time.perf_counter() - began,
    }


def estimate(config: DdpConfig, data: Split, probed: Probe | None = None) -> Estimate:
    """Time a few steps on one rank's share of a batch, using one thread like a rank."""
    num_samples = len(data.train_targets)
    per_epoch = -(-num_samples // config.global_batch_size)
    num_steps = per_epoch * config.epochs
    step_s = _step_s(config, data)
    rounds = max(1.0, config.world_size / (os.cpu_count() or 1))
    if config.device == "cuda":
        rounds = 1.0
    start_s = probed.start_s if probed else START_S
    messages_s = probed.messages_s if probed else None
    return Estimate(
        num_steps=num_steps,
        step_s=step_s,
        messages_s=messages_s,
        start_s=start_s,
        seconds=start_s + num_steps * (step_s * rounds + (messages_s or 0.0)),
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
