"""A small training with everything a checkpoint needs, to see what each item is worth.

It uses dropout, batch norm, noise from Python's and numpy's generators, bfloat16 with
master weights and top-k (or float16 with a loss scaler), momentum, a learning rate that
falls in each step, and shuffled batches. We stop it and continue in new objects with
another seed, optionally without restoring one item of the state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distlab.checkpoints import training_state
from distlab.checkpoints.training_state import Run, State
from distlab.comm import RealDisk
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.digests import digest
from distlab.runner import RankContext

UNITS = ("mixed_precision", "gradient_compression", "data_loader")
"""The units that the training uses, besides `fault_tolerance`."""

ITEMS = (
    "master",
    "optimizer",
    "scheduler",
    "residuals",
    "loader",
    "random.python",
    "random.numpy",
    "random.torch",
    "buffers",
)
"""The items that a bfloat16 training with top-k can leave out."""

SCALER = "scaler"
"""The item that a float16 training can leave out as well."""

_SIZES = 12, 16, 4  # inputs, hidden, classes
_SAMPLES, _BATCH = 60, 12
_SCALE = {"init_scale": 2.0**12, "growth_interval": 4}
Parts = Mapping[str, Mapping[str, Any]]
"""The code of each unit by its name, as `as_parts` returns it."""


@dataclass(kw_only=True)
class StepState:
    """The state of one rank at the end of a step."""

    step: int
    weights: str  # their digest
    held_out: str  # that of the outputs for other samples, in evaluation mode


@dataclass
class _Bucket:
    parameters: list[Tensor]
    flat: Tensor


class ResumedTraining:
    """One rank's training; all ranks create it and step together."""

    def __init__(
        self, context: RankContext, parts: Parts, half: str, seed: int
    ) -> None:
        precision, compression, data_loader = (_unit(parts[name]) for name in UNITS)
        self._comm, self._precision = context.comm, precision
        self._dtype: torch.dtype = getattr(torch, half)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(_SIZES[0], _SIZES[1]),
            nn.BatchNorm1d(_SIZES[1]),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(_SIZES[1], _SIZES[2]),
        ).to(self._dtype)
        self._master = precision.master_copy(self.model)
        self._optimizer = torch.optim.SGD(self._master, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, _falling)
        self._schedule, self._loader = schedule, _make_loader(context, data_loader)
        self._batches = self._all_epochs()
        self._hook, self._scaler, scaler = None, None, {}
        if half == "float16":
            self._scaler = precision.LossScaler(self._comm, **_SCALE)
            scaler = {SCALER: self._scaler}
        else:
            self._hook = compression.TopK(ratio=0.25)
        self.run = Run(
            model=self.model,
            optimizer=self._optimizer,
            master=self._master,
            parts={"scheduler": schedule, "loader": self._loader, **scaler},
            hook=self._hook,
        )
        training_state.seed_all(seed * 1000 + context.rank)

    def steps(self, first: int, last: int) -> list[StepState]:
        """Run the steps from `first` to `last`."""
        done: list[StepState] = []
        for step, (inputs, targets) in zip(
            range(first, last + 1), self._batches, strict=False
        ):
            self._step(inputs, targets)
            done.append(self._noted(step))
        return done

    def _all_epochs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches from the loader's position onward, through all epochs."""
        while True:
            yield from self._loader
            self._loader.set_epoch(self._loader.epoch + 1)

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        noise = np.random.standard_normal(inputs.shape)
        noisy = inputs + random.random() * 0.1 * torch.from_numpy(noise).to(inputs)
        self.model.train()
        self.model.zero_grad()
        outputs = self.model(noisy.to(self._dtype))
        loss = cross_entropy(outputs, targets)
        if self._scaler is not None:
            self._scaler.scale(loss).backward()
            self._precision.gradients_to_master(self._comm, self.model, self._master)
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            loss.backward()
            self._send()
            self._optimizer.step()
        self._schedule.step()
        self._precision.master_to_model(self._master, self.model)

    def _send(self) -> None:
        """Set the master's gradient to the mean of what the ranks have sent."""
        assert self._hook is not None
        found = [p for p in self.model.parameters() if p.grad is not None]
        grads = [p.grad.float().flatten() for p in found if p.grad is not None]
        bucket = _Bucket(list(found), torch.cat(grads))
        self._hook(self._comm, bucket).wait()
        mean = bucket.flat / self._comm.world_size
        sizes = [p.numel() for p in found]
        for copy, part in zip(self._master, mean.split(sizes), strict=True):
            copy.grad = part.view_as(copy)

    def _noted(self, step: int) -> StepState:
        weights = torch.cat([copy.detach().flatten() for copy in self._master])
        self.model.eval()
        with torch.no_grad():
            probe = torch.linspace(-1, 1, 3 * _SIZES[0]).view(3, -1)
            outputs = self.model(probe.to(self._dtype))
        return StepState(step=step, weights=digest(weights), held_out=digest(outputs))


def stopped_and_resumed(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    parts: str,
    half: str,
    stop: int,
    last: int,
    without: tuple[str, ...],
) -> dict[str, tuple[int | None, int | None]]:
    """Return for each item where the runs part if we don't load it: see `parts_at`.

    `unit` saves and loads. `parts` is the code of the other units, as JSON.
    """
    units, folder = json.loads(parts), str(Path.cwd().parent / f"saved {half}")
    steps = _unbroken(context, unit, seed, units, folder, half, stop, last)
    whole, found = [*map(_plain, steps)], {}
    for item in without:
        steps = _resumed(context, unit, seed + 1, units, folder, half, last, item)
        found[item] = parts_at(whole, [*map(_plain, steps)])
    return found


def unbroken(
    context: RankContext, units: dict[str, dict[str, Any]], folder: str, *how: Any
) -> list[tuple[int, str, str]]:
    """Train to the end and save on the way; `how` is half, stop, last."""
    unit = _unit(units["fault_tolerance"])
    return [*map(_plain, _unbroken(context, unit, 0, units, folder, *how))]


def resumed(
    context: RankContext, units: dict[str, dict[str, Any]], folder: str, *how: Any
) -> list[tuple[int, str, str]]:
    """Continue from the folder; `how` is half, last, and the items to leave out."""
    unit = _unit(units["fault_tolerance"])
    return [*map(_plain, _resumed(context, unit, 1, units, folder, *how))]


def _unbroken(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    parts: Parts,
    folder: str,
    half: str,
    stop: int,
    last: int,
) -> list[StepState]:
    training, comm = ResumedTraining(context, parts, half, seed), context.comm
    training.steps(1, stop)
    shared, own = unit.full_state(training.run)
    packed = training_state.pack(shared, own, comm.rank, comm.world_size)
    unit.save(comm, RealDisk(folder), stop, *packed)
    return training.steps(stop + 1, last)


def _resumed(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    parts: Parts,
    folder: str,
    half: str,
    last: int,
    without: str,
) -> list[StepState]:
    training, comm = ResumedTraining(context, parts, half, seed), context.comm
    found = unit.load(RealDisk(folder))
    if found is None:
        raise ValueError("there is no checkpoint")
    shared, owns = training_state.unpack(found)
    if without:
        _leave_out(without, shared, owns, *unit.full_state(training.run))
    unit.restore(training.run, shared, owns, comm.rank, comm.world_size)
    return training.steps(found.step + 1, last)


def _leave_out(
    item: str, shared: State, owns: list[State], new: State, own: State
) -> None:
    """Replace a saved item by the one of a run that has just been created."""
    if item == "master":  # who saves the model only makes them from its weights
        shared[item] = [p.float() for p in shared["parameters"].values()]
    elif item.startswith("random."):
        kind = item.partition(".")[2]
        for saved in owns:
            saved["random"] = saved["random"] | {kind: own["random"][kind]}
    elif item in shared:
        shared[item] = new[item]
    else:
        for saved in owns:
            saved[item] = own[item]


def parts_at(
    unbroken: list[tuple[int, str, str]], resumed: list[tuple[int, str, str]]
) -> tuple[int | None, int | None]:
    """Return the first step with other weights, and with other held-out outputs."""
    steps: list[int | None] = []
    for column in (1, 2):
        pairs = zip(unbroken, resumed, strict=True)
        apart = (one[0] for one, other in pairs if one[column] != other[column])
        steps.append(next(apart, None))
    return steps[0], steps[1]


def _falling(step: int) -> float:
    return 1 / (1 + 0.05 * step)


def _plain(step: StepState) -> tuple[int, str, str]:
    return step.step, step.weights, step.held_out


def _make_loader(context: RankContext, data_loader: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, _SIZES[0], generator=generator)
    targets = inputs[:, : _SIZES[2]].argmax(1)
    return data_loader.DistributedDataLoader(
        TensorDataset(inputs, targets),
        _BATCH,
        context.rank,
        context.world_size,
        shuffle=True,
        seed=0,
    )


def _unit(parts: Mapping[str, Any]) -> Any:
    source, reference = arrived(parts["source"]), arrived(parts["reference"])
    return load_graft(source, reference, parts["grafts"])
