"""Train in a group that is rebuilt after a fault: the script of the other modes.

    python -m distlab.launch --nproc-per-node 3 --standby 1 --max-restarts 3 \
        train_elastic.py FOLDER

The network, the optimizer, the order of samples and the seeds are those of train.py, so
the weights at the end are equal as well. If a rank dies, the others don't restart: see
distlab.distributed.elastic.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

import distlab.distributed as dist
from distlab.chaos.faults import Faults
from distlab.chaos.ledger import Ledger
from distlab.chaos.plan import Setting, plan_here
from distlab.chaos.train import (
    Learner,
    is_finite_everywhere,
    read_arguments,
    weights_of,
)
from distlab.checkpoints import training_state
from distlab.checkpoints.files import CheckpointError
from distlab.comm import PeerLost
from distlab.data.digits import load_digits_split
from distlab.distributed.parts import unit


class ElasticTraining(Learner):
    """One process: a rank of the run, or one that waits to become a rank."""

    def __init__(
        self, setting: Setting, folder: Path, faults: Faults, ledger: Ledger
    ) -> None:
        super().__init__(setting, faults, ledger)
        self.data = load_digits_split()
        self.training = dist.elastic(
            {
                "model": self.module,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
            },
            folder=folder,
            save_every=setting.save_every,
        )
        if self.training._disk is not None:
            self.training._disk = faults.disk(self.training._disk)  # type: ignore[assignment]
        self._generation = -1

    def train(self) -> None:
        """Train for all remaining steps."""
        every, size = self.setting.save_every, self.setting.steps_per_epoch
        for step in self.training.steps(self.setting.num_steps):
            before = self.training.completed
            with step:
                self._step(step.index)
            done = self.training.completed
            if done != before + 1:
                continue
            if done % every == 0:
                self._write("saved", step=done)
            if done % size == 0:
                self.faults.at("epoch", done)

    def end(self) -> None:
        """Record the result."""
        step, size = self.setting.num_steps, self.comm.world_size
        self._write("ended", step=step, size=size, **weights_of(self.module))

    def _step(self, index: int) -> None:
        self.step = number = index + 1
        if self.generation != self._generation:
            self._generation = self.generation
            self._write("resumed", step=index, refused=[])
        if index == 0:
            training_state.seed_all(self.setting.seed * 1000 + self.comm.rank)
        samples, data = self._samples(index), self.data
        inputs, targets = data.train_inputs[samples], data.train_targets[samples]
        self._require_finite(self.find_gradients(inputs, targets))
        self.update()
        first = next(self.module.parameters())
        for moment in ("save", "epoch"):
            self.faults.poison(moment, number, first)
        self._require_finite(list(self.module.parameters()))
        self._write("step", step=number, samples=samples)

    def _samples(self, index: int) -> list[int]:
        """Return the samples that unit data_loader gives this rank in a step."""
        setting, comm = self.setting, self.comm
        loader = unit("data_loader").DistributedDataLoader(
            range(setting.num_samples),
            setting.global_batch_size,
            comm.rank,
            comm.world_size,
            seed=setting.seed,
        )
        loader.set_epoch(index // setting.steps_per_epoch)
        batch: list[int] = loader.batches()[index % setting.steps_per_epoch]
        return batch

    def _require_finite(self, tensors: list[Tensor]) -> None:
        if not is_finite_everywhere(self.comm, tensors):
            self._say("a gradient or a weight is not finite: all ranks start again")
            sys.exit(1)

    @property
    def generation(self) -> int:
        """The group's generation, which grows whenever the group is rebuilt."""
        return int(getattr(self.comm, "generation", 0))

    def _write(self, what: str, **more: Any) -> None:
        place = {"rank": self.comm.rank, "generation": self.generation}
        self.ledger.write(what, **place, **more)

    def _say(self, text: str) -> None:
        print(f"rank {self.comm.rank}: {text}", flush=True)


def main() -> int:
    """Train as one process and return the exit code."""
    setting, folder = read_arguments()
    ledger = Ledger(folder, 0, 0)
    dist.init_process_group("gloo", timeout_s=setting.timeout_s)
    comm, checkpoints = dist.default_comm(), folder / "checkpoints"
    faults = Faults(plan_here(), lambda: comm.rank, checkpoints)
    try:
        training = ElasticTraining(setting, checkpoints, faults, ledger)
        training.train()
        training.end()
        dist.destroy_process_group()
    except (PeerLost, CheckpointError) as error:
        print(f"rank {os.environ.get('RANK')}: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
