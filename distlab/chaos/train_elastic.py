"""Train in a group that is rebuilt after a fault: the script of the other modes.

    python -m distlab.launch --nproc-per-node 3 --standby 1 --max-restarts 3 \
        train_elastic.py FOLDER

The network, the optimizer, the order of samples and the seeds are those of train.py, so
the weights at the end are equal as well. If a rank dies, the others don't restart: see
distlab.distributed.elastic.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import distlab.distributed as dist
from distlab.chaos.faults import Faults
from distlab.chaos.ledger import Ledger
from distlab.chaos.plan import Setting, plan_here
from distlab.chaos.train import (
    BUCKET_MIB,
    is_finite_everywhere,
    make_network,
    make_optimizer,
    weights_of,
)
from distlab.comm import Comm, PeerLost, Work
from distlab.data.digits import load_digits_split
from distlab.distributed.parts import unit
from distlab.given import training_state
from distlab.given.checkpoint import CheckpointError


class ElasticTraining:
    """One process: a rank of the run, or one that waits to become a rank."""

    def __init__(
        self, setting: Setting, folder: Path, faults: Faults, ledger: Ledger
    ) -> None:
        self.setting, self.faults, self.ledger = setting, faults, ledger
        self.comm = dist.default_comm()
        torch.manual_seed(setting.seed)
        self.module = make_network(setting.dropout)
        self.model = dist.DistributedDataParallel(
            self.module, bucket_size_mib=BUCKET_MIB, comm_hook=self._send
        )
        self.optimizer, self.schedule = make_optimizer(self.module)
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
        number = index + 1
        if self.generation != self._generation:
            self._generation = self.generation
            self._write("resumed", step=index, refused=[])
        if index == 0:
            training_state.seed_all(self.setting.seed * 1000 + self.comm.rank)
        self._number = number
        samples = self._samples(index)
        outputs = self.model(self.data.train_inputs[samples])
        self.faults.at("forward", number)
        self.faults.poison("forward", number, outputs)
        self.optimizer.zero_grad()
        cross_entropy(outputs, self.data.train_targets[samples]).backward()
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        self._require_finite(grads)
        self.faults.at("optimizer", number)
        self.optimizer.step()
        self.schedule.step()
        first = next(self.module.parameters())
        for moment in ("optimizer", "save", "epoch"):
            self.faults.poison(moment, number, first)
        self._require_finite(list(self.module.parameters()))
        self._write("step", step=number, samples=samples)

    def _samples(self, index: int) -> list[int]:
        """Return this rank's samples of a step, as the loader of 1.10 would."""
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

    def _send(self, comm: Comm, bucket: Any) -> Work:
        self.faults.poison("all-reduce", self._number, bucket.flat)
        work = comm.all_reduce(bucket.flat, async_op=True)
        self.faults.at("all-reduce", self._number)
        assert work is not None
        return work

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
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="ledgers and checkpoints")
    parser.add_argument("--setting", default="{}", help="fields of Setting, as JSON")
    options = parser.parse_args()
    setting = Setting.from_json(options.setting)
    ledger = Ledger(options.folder, 0, 0)
    dist.init_process_group("gloo", timeout_s=setting.timeout_s)
    comm, checkpoints = dist.default_comm(), options.folder / "checkpoints"
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
