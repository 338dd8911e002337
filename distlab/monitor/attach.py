"""Record the steps of an unchanged script: `distlab.launch --monitor`.

    torch.optim      a step of the first optimizer that steps is a step
    DataLoader       seconds waited, samples; a pass that has a step is an epoch
    set_epoch        of a DistributedSampler: says the epoch

We can't see the losses this way, and communication counts as computation. Each rank
writes its own file in the folder, one line for every 10 steps, and the launcher reads
these files.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distlab.attached import after_import
from distlab.attached import variables as attaching
from distlab.monitor.memory import peak_resident_bytes
from distlab.monitor.records import StepRecord

FOLDER, STEP = "DISTLAB_MONITOR", "DISTLAB_MONITOR_STEP"
"""Environment variables of a rank: the folder, and the steps of earlier starts."""
EVERY = 10  # steps in a record


def variables(folder: Path, step: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a rank's steps are recorded."""
    return {FOLDER: str(folder), STEP: str(step), **attaching(__name__, inherited)}


class Steps:
    """Counts the steps of this process, and records them."""

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        self._path, self._rank = folder / f"rank_{rank}.jsonl", rank
        self.step, self._pid = step, os.getpid()
        self._optimizer: weakref.ref[Any] | None = None
        self.epoch, self._is_said = 0, False
        self._is_new_pass = False
        self._begin()

    def _begin(self) -> None:
        self._started_s = self._newest_s = time.perf_counter()
        self._num_steps = 0
        self.data_wait_s, self.samples = 0.0, 0

    def on_step(self, optimizer: Any, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        if self._optimizer is None:
            os.environ.pop(FOLDER, None)  # what this process starts now is no rank
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer or os.getpid() != self._pid:
            return
        if not self._is_said and (self._is_new_pass or not self.epoch):
            self.epoch += 1
        self._is_new_pass = False
        self._newest_s = time.perf_counter()
        self.step, self._num_steps = self.step + 1, self._num_steps + 1
        if self.step % EVERY == 0:
            self.write()

    def on_pass(self) -> None:
        """Note that a DataLoader begins a pass, perhaps one without steps."""
        self._is_new_pass = True

    def on_epoch(self, epoch: int) -> None:
        """Note the epoch that begins, counted from 0, as the script sets it."""
        self.epoch, self._is_said = int(epoch) + 1, True

    def write(self) -> None:
        """Write the steps that have no record yet."""
        if not self._num_steps or os.getpid() != self._pid:
            return
        seconds = self._newest_s - self._started_s
        optimizer = self._optimizer() if self._optimizer else None
        record = StepRecord(
            rank=self._rank,
            step=self.step,
            epoch=self.epoch,
            time_s=time.time(),
            num_steps=self._num_steps,
            seconds=seconds,
            samples=self.samples,
            loss=None,
            data_wait_s=min(seconds, self.data_wait_s),
            communication_s=0.0,
            learning_rate=_rate(optimizer),
            grad_norm=None,
            memory_bytes=peak_resident_bytes(),
            gpu_utilization=None,
        )
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(record)) + "\n")
        except OSError as error:
            self._pid = -1  # the training goes on without records
            print(f"{self._path} can't be written: {error}", file=sys.stderr)
        self._begin()


def _rate(optimizer: Any) -> float | None:
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def attach() -> None:
    """Record the steps of this process, if it is a rank and torch is ever imported."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if not folder or rank is None:
        return
    steps = Steps(Path(folder), int(rank), int(os.environ.get(STEP, "0")))
    atexit.register(steps.write)
    attached: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": lambda module: (
            module.register_optimizer_step_post_hook(steps.on_step)
        ),
        "torch.utils.data.dataloader": lambda module: _watch_loaders(module, steps),
        "torch.utils.data.distributed": lambda module: _watch_sampler(module, steps),
    }
    after_import(attached)


def _watch_loaders(module: Any, steps: Steps) -> None:
    import torch

    iterator, loader = module._BaseDataLoaderIter, module.DataLoader
    take, begin = iterator.__next__, loader.__iter__

    @functools.wraps(take)
    def timed(self: Any) -> Any:
        asked_s = time.perf_counter()
        try:
            batch = take(self)
        finally:
            steps.data_wait_s += time.perf_counter() - asked_s
        if torch.is_grad_enabled():  # an evaluation asks for no gradients
            steps.samples += _num_samples(batch)
        return batch

    @functools.wraps(begin)
    def iterate(self: Any) -> Any:
        steps.on_pass()
        return begin(self)

    iterator.__next__, loader.__iter__ = timed, iterate


def _watch_sampler(module: Any, steps: Steps) -> None:
    own = module.DistributedSampler.set_epoch

    @functools.wraps(own)
    def set_epoch(self: Any, epoch: int) -> None:
        steps.on_epoch(epoch)
        own(self, epoch)

    module.DistributedSampler.set_epoch = set_epoch


def _num_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor, or 0 if there is none."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    try:
        return int(batch.shape[0])
    except Exception:  # whatever the script's own class raises: its training goes on
        return 0
