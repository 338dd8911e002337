"""Train on the digits and continue after any fault: the script that is launched.

    python -m distlab.launch --nproc-per-node 3 --max-restarts 3 train.py FOLDER

The network has dropout, the optimizer has momentum, the learning rate falls in each
step, and the samples are shuffled. If a run restores any of these wrongly when it
continues, it ends with different weights. Every few steps it saves a checkpoint while
training continues, and it loads the newest one after a restart (fault_tolerance). Each
rank records the samples that it has trained with.

    SIGTERM        all ranks finish the step, save a checkpoint, and end
    NaN            all ranks stop, before a NaN gets into a checkpoint
    a lost rank    the others stop with a one-line message; the launcher restarts all
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: better before the ranks meet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import distlab.distributed as dist
from distlab.chaos.faults import Faults
from distlab.chaos.ledger import Ledger
from distlab.chaos.plan import Setting, plan_here
from distlab.checkpoints import training_state
from distlab.checkpoints.files import CheckpointError
from distlab.checkpoints.saved_run import packed, resume
from distlab.checkpoints.training_state import Run
from distlab.comm import Comm, DiskError, PeerLost, RealDisk, ReduceOp, Work
from distlab.comm.tcp.mesh import MeetingError
from distlab.data.digits import load_digits_split
from distlab.distributed.notice import SAVED, Notice
from distlab.distributed.parts import unit

BUCKET_MIB = 0.05  # several buckets in each step
_HIDDEN, _NUM_SHADOWS = 96, 8
_LR, _MOMENTUM = 0.1, 0.9


class StopError(RuntimeError):
    """Raised if this run can't continue; one line says why."""


class Learner:
    """A rank's model and optimizer, and the steps in which faults may happen."""

    def __init__(self, setting: Setting, faults: Faults, ledger: Ledger) -> None:
        self.setting, self.faults, self.ledger = setting, faults, ledger
        self.comm = dist.default_comm()
        torch.manual_seed(setting.seed)
        self.module = make_network(setting.dropout)
        self.model = dist.DistributedDataParallel(
            self.module, bucket_size_mib=BUCKET_MIB, comm_hook=self._send
        )
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=_LR, momentum=_MOMENTUM
        )
        self.schedule = LambdaLR(self.optimizer, _falling)
        self.step = 0

    def find_gradients(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Run forward and backward, and return the gradients."""
        outputs = self.model(inputs)
        self.faults.at("forward", self.step)
        self.faults.poison("forward", self.step, outputs)
        self.optimizer.zero_grad()
        cross_entropy(outputs, targets).backward()
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def update(self) -> None:
        """Take the step of the optimizer and of the learning rate."""
        self.faults.at("optimizer", self.step)
        self.optimizer.step()
        self.schedule.step()
        self.faults.poison("optimizer", self.step, next(self.module.parameters()))

    def _send(self, comm: Comm, bucket: Any) -> Work:
        """Send a bucket's gradients; a fault may happen between two buckets."""
        self.faults.poison("all-reduce", self.step, bucket.flat)
        work = comm.all_reduce(bucket.flat, async_op=True)
        self.faults.at("all-reduce", self.step)
        assert work is not None
        return work


class ChaosTraining(Learner):
    """One rank's part of the run; all ranks create it, and step together."""

    def __init__(
        self, setting: Setting, folder: Path, faults: Faults, ledger: Ledger
    ) -> None:
        super().__init__(setting, faults, ledger)
        comm, data = self.comm, load_digits_split()
        count = setting.num_samples
        self.loader = unit("data_loader").DistributedDataLoader(
            TensorDataset(
                data.train_inputs[:count],
                data.train_targets[:count],
                torch.arange(count),
            ),
            setting.global_batch_size,
            comm.rank,
            comm.world_size,
            seed=setting.seed,
            num_workers=setting.num_workers,
        )
        self.run = Run(
            model=self.module,
            optimizer=self.optimizer,
            parts={"schedule": self.schedule, "loader": self.loader},
        )
        training_state.seed_all(setting.seed * 1000 + comm.rank)
        self.unit = unit("fault_tolerance")
        self.real_disk = RealDisk(folder)
        self.saver = self.unit.AsyncSaver(comm, faults.disk(self.real_disk))
        self.notice = Notice(comm)
        self._saving = 0  # the step of the checkpoint that is under way
        self._is_first = True

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        found = resume(self.comm, self.unit, lambda: self.real_disk, self.run)
        if found is not None:
            self.step = found.step
            for line in found.refused:
                self._say(f"a newer checkpoint was not taken: {line}")
        refused = list(found.refused) if found else []
        self.ledger.write("resumed", step=self.step, refused=refused)

    def train(self) -> None:
        """Train for all remaining epochs."""
        while self.loader.epoch < self.setting.num_epochs:
            for inputs, targets, samples in self.loader:
                self.step += 1
                self._step(inputs, targets, samples.tolist())
            self.faults.at("epoch", self.step)
            self.faults.poison("epoch", self.step, next(self.module.parameters()))
            self.loader.set_epoch(self.loader.epoch + 1)
        self._settle()

    def _step(self, inputs: Tensor, targets: Tensor, samples: list[int]) -> None:
        must_end = self._agree(self.find_gradients(inputs, targets))
        self.update()
        self.ledger.write("step", step=self.step, samples=samples)
        if self._is_first:
            self._is_first = False
            self._say(f"step {self.step} is done")
        if self.step % self.setting.save_every == 0 or must_end:
            self._save()
        if must_end:
            self._settle()
            self._say(f"SIGTERM: saved step {self.step}")
            sys.exit(SAVED)

    def _agree(self, grads: list[Tensor]) -> bool:
        """Return True if a rank has to end; all stop if a gradient isn't finite."""
        is_finite = all(bool(grad.isfinite().all()) for grad in grads)
        flags = torch.tensor([float(not is_finite), float(self.notice.is_here)])
        self.comm.all_reduce(flags, ReduceOp.MAX)
        if flags[0]:
            raise StopError("the gradient is not finite")
        return bool(flags[1])

    def _save(self) -> None:
        """Begin to save; if it fails, training continues."""
        self.faults.poison("save", self.step, next(self.module.parameters()))
        self._require_finite()
        tensors, meta = packed(self.comm, self.unit, self.run)
        if self._attempt(lambda: self.saver.save(self.step, tensors, meta)):
            self._saving = self.step
        else:  # this step was not tried: the error was that of the one before
            self.saver.save(self.step, tensors, meta)
            self._saving = self.step

    def _require_finite(self) -> None:
        """Refuse to save a checkpoint from which a run couldn't continue."""
        weights = [p.detach() for p in self.module.parameters()]
        if not is_finite_everywhere(self.comm, weights):
            raise StopError("a parameter is not finite: it is not saved")

    def _attempt(self, call: Any) -> bool:
        """Call it, and record how the save before ended, which it has by then."""
        before, self._saving = self._saving, 0
        try:
            call()
        except CheckpointError as error:
            self._say(f"training goes on without a checkpoint: {_line(error)}")
            return False
        if before:
            self.ledger.write("saved", step=before)
        return True

    def _settle(self) -> None:
        """Wait for the last checkpoint."""
        self._attempt(self.saver.wait)

    def _say(self, text: str) -> None:
        print(f"rank {self.comm.rank}, step {self.step}: {text}", flush=True)


def make_network(dropout: float) -> nn.Module:
    """Make a float64 network for 64 pixels and 10 digits, using torch's generator."""
    return nn.Sequential(
        nn.Linear(64, _HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, 10),
    ).double()


def is_finite_everywhere(comm: Comm, tensors: Iterable[Tensor]) -> bool:
    """Return True if no rank has a NaN or an infinity; collective."""
    is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    flag = torch.tensor([float(not is_finite)])
    comm.all_reduce(flag, ReduceOp.MAX)
    return not flag.item()


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the ledger's entry for all weights: a digest, and random projections.

    The digest is equal if all bits are equal, and the projections are close if all
    weights are close.
    """
    row = torch.cat([p.detach().flatten() for p in module.parameters()])
    generator = torch.Generator().manual_seed(0)
    axes = torch.randn(_NUM_SHADOWS, len(row), generator=generator, dtype=row.dtype)
    found = hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]
    return {"weights": found, "projections": (axes @ row).tolist()}


def _falling(step: int) -> float:
    return 1 / (1 + 0.02 * step)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_arguments() -> tuple[Setting, Path]:
    """Return the setting, and the folder of ledgers and checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="ledgers and checkpoints")
    parser.add_argument("--setting", default="{}", help="fields of Setting, as JSON")
    options = parser.parse_args()
    return Setting.from_json(options.setting), options.folder


def main() -> int:
    """Train as one rank and return the exit code."""
    setting, folder = read_arguments()
    rank = int(os.environ.get("RANK", "0"))
    generation = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    ledger = Ledger(folder, rank, generation)
    ledger.write("started", pid=os.getpid())
    training = None
    try:
        dist.init_process_group(
            os.environ.get("DISTLAB_BACKEND", "gloo"), timeout_s=setting.timeout_s
        )
        ledger.write("met")
        checkpoints = folder / "checkpoints"
        faults = Faults(plan_here(), lambda: rank, checkpoints)
        training = ChaosTraining(setting, checkpoints, faults, ledger)
        training.resume()
        training.train()
        size = training.comm.world_size
        ledger.write(
            "ended", step=training.step, size=size, **weights_of(training.module)
        )
        dist.destroy_process_group()
    except (PeerLost, MeetingError, CheckpointError, DiskError, StopError) as error:
        at = f", step {training.step}" if training else ""
        print(f"rank {rank}{at}: {_line(error)}", flush=True)
        ledger.write("gave up", why=_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
