"""The capstone: a trainer of image classifiers, composed of the course's units.

Guide: phase4_production/guide/imagenet_trainer.md.
Source: P. Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), section 3,
for what must stay the same on any number of ranks; torchvision's reference trainer.
Symbols: n = comm.world_size; K = job.grad_accum_steps, the microbatches of a step.
Cost: a step costs the forward and backward of K microbatches, and one all_reduce of
the gradients, most of it during the last backward().

    microbatch 1 … K   forward, scaled loss, backward      no_sync on all but the last
    gradients          unscale, clip                       of the global batch, once
    step               optimizer, scheduler, average       skipped by all or by none
    epoch              set_epoch, train mode, evaluation of the averaged weights
    checkpoint         all that the next step depends on

Run it alone, or under torchrun, srun or python -m distlab.launch:
    torchrun --nproc-per-node 2 solutions/phase4_production/imagenet_trainer.py --help
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import distlab.distributed as dist
from distlab.checkpoints import training_state
from distlab.checkpoints.files import CheckpointError
from distlab.checkpoints.saved_run import expect_shared, packed, resume
from distlab.checkpoints.training_state import Run
from distlab.comm import DiskError, RealDisk
from distlab.distributed.job import build, start, use_code
from distlab.distributed.notice import SAVED, Notice
from distlab.distributed.parts import unit
from distlab.distributed.watch import Watch, introduce, say
from distlab.distributed.whole_runs import WholeRun
from distlab.given.imagenet_trainer import Job, Metrics
from distlab.given.monitoring import checksum
from distlab.recipe.options import Options, read_options, require_same

SETTINGS = "settings"
"""Beside the run's state in a checkpoint: the flags that must not change."""

# ── 4.11 what a step, an epoch and a checkpoint consist of ──────────────────────────


def train_step(job: Job, inputs: Tensor, targets: Tensor) -> float:
    """Take one step with the mean gradient of the global batch; return the mean loss.

    Given: this rank's samples of the global batch, at least K. The ranks may have
    unequal numbers of them. A parameter may be frozen. job.loss_fn is a mean over
    samples. job.engine averages over the ranks: it adds their gradients and divides
    by n.

    C1 The weights end up the same as if one process had trained on the global batch,
       regardless of any `.grad` that an earlier step left behind. The loss is a float
       that is the same on every rank and exact in the model's dtype.
    C2 The batch goes through the engine under job.autocast(), in K microbatches whose
       sizes differ by at most one. Each gradient is sent only once, so every microbatch
       but one runs its forward and its backward() under no_sync().
    C3 The unscaled gradient of the global batch is clipped, and its norm is at most
       job.clip_norm afterwards.
    C4 If the scaler skips the step, neither the learning rate nor the averaged weights
       change.
    In torch.distributed: the body of torchvision's train_one_epoch
    Cost: two all_reduces of one element. Check: distlab check 4.11
    """
    # TODO(imagenet_trainer.compose)
    # how many samples does the global batch have, and what does the engine divide by?
    # tensor_split(K); job.autocast() around the forward and the loss, not around
    # backward(); nn.utils.clip_grad_norm_; job.scaler.step says whether it stepped
    raise NotImplementedError("imagenet_trainer.compose")


def fit(
    job: Job,
    num_epochs: int,
    on_step: Callable[[int, float], bool],
    on_epoch: Callable[[int, Any], None],
) -> None:
    """Train up to epoch `num_epochs`; call on_step after each step.

    Given: a job that is new, or was restored in the middle of an epoch. job.evaluate
    may leave the model in evaluation mode. on_step(epoch, loss) returns False to stop:
    then return at once. on_epoch(epoch, …) gets what job.evaluate(model) returned.

    C5 Training continues at the loader's position. Before its first batch, each epoch
       calls set_epoch to get its own order and switches the model to training mode.
       Every batch goes through job.prepare.
    C6 After each epoch, the averaged weights are evaluated. The model gets its own
       weights back before on_epoch is called.
    In torch.distributed: the loop over epochs of torchvision's train.py
    Example: restored in epoch 2 of 4 → epochs 2 and 3. Check: distlab check 4.11
    """
    # TODO(imagenet_trainer.compose)
    # job.loader has epoch and set_epoch(); job.average.in_place_of(model) is a block
    raise NotImplementedError("imagenet_trainer.compose")


def run_of(job: Job) -> Run:
    """Return what a checkpoint saves and restores, for full_state and restore of 4.5.

    C7 After a job has been restored, all its later steps are bit-for-bit the same.
       Besides the model, the optimizer and the hook, `parts` contains everything else
       that must be saved, under the names used in Job.
    In torch.distributed: the dict that torchvision's train.py saves, and random numbers
    Check: distlab check 4.11
    """
    # TODO(imagenet_trainer.compose)
    # which objects of the job change from step to step?
    raise NotImplementedError("imagenet_trainer.compose")


# ── a run: its checkpoints, its records, its command ────────────────────────────────


class Saved:
    """The checkpoints of a job, 4.3 to 4.5; without a folder, there are none."""

    def __init__(self, options: Options, job: Job) -> None:
        self.job, self.run = job, WholeRun(job, run_of(job))
        self.every = options.save_every
        self.folder = options.checkpoint
        self.disk = RealDisk(options.checkpoint) if options.checkpoint else None
        self.notice = Notice(job.comm) if self.disk else None
        self.units = unit("fault_tolerance")
        self.newest = 0  # the step of the newest checkpoint

    def restore(self) -> int:
        """Restore the newest complete checkpoint; return its step, or 0 without one.

        Raises:
            ValueError: a training with other settings saved it.
        """
        if self.disk is None:
            return 0
        disk, settings = self.disk, self.job.settings
        newest = resume(
            self.job.comm,
            self.units,
            lambda: disk,
            self.run.whole,
            check=lambda it: require_same(self.folder, settings, it.get(SETTINGS)),
        )
        if newest is None:
            say(self.job.comm, f"no checkpoint in {self.folder} yet: starts at step 0")
            return 0
        self.run.scatter()
        for line in newest.refused:
            say(self.job.comm, f"skipped a newer checkpoint: {line}")
        say(self.job.comm, f"resumes after step {newest.step} from {self.folder}")
        self.newest = newest.step
        return self.newest

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save if it is time and not done yet; collective."""
        is_due = step != self.newest and (is_last or step % self.every == 0)
        if self.disk is None or not is_due:
            return
        settings = {SETTINGS: self.job.settings}
        comm = self.job.comm
        self.run.gather()
        state = packed(comm, self.units, self.run.whole, shared=settings)
        self.units.save(comm, self.disk, step, *state)
        expect_shared(comm, self.disk, step)
        say(comm, f"saved step {step} in {self.folder}")
        self.newest = step

    def must_end(self) -> bool:
        """Return True if SIGTERM reached any rank, so that all save; collective."""
        return self.notice is not None and self.notice.is_anywhere()


def train(options: Options) -> Metrics:
    """Train as the options say; return the result of the last evaluation.

    Raises:
        ValueError: the options contradict the data, the ranks or the checkpoint.
        SystemExit: SIGTERM came, and we have saved the step in which it came.
    """
    comm = start(options)
    training_state.seed_all(options.seed + comm.rank)
    job = build(options, comm)
    introduce(options, job)
    saved = Saved(options, job)
    step = saved.restore()
    watch = Watch(options, job, step)
    is_ended = False
    metrics: list[Metrics] = []

    def on_step(epoch: int, loss: float) -> bool:
        nonlocal step, is_ended
        step += 1
        is_ended = saved.must_end()
        is_last = is_ended or step == options.max_steps
        watch.end_step(step, epoch, loss)
        saved.save(step, is_last=is_last)
        return not is_last

    def on_epoch(epoch: int, last: Metrics) -> None:
        metrics.append(last)
        watch.end_epoch(epoch, last)

    if 0 < options.max_steps <= step:
        watch.say(f"--max-steps {options.max_steps}: the checkpoint has step {step}")
    elif job.loader.epoch >= options.epochs:
        watch.say(f"--epochs {options.epochs}: the checkpoint is in a later one")
    else:
        fit(job, options.epochs, on_step, on_epoch)
        saved.save(step, is_last=True)
    watch.close()
    weights = checksum(parameter for parameter in job.engine.whole().parameters())
    watch.say(f"step {step}  weights {weights:08x}")
    dist.destroy_process_group()
    if is_ended:
        watch.say("SIGTERM came: this step is saved, and the training ends here")
        sys.exit(SAVED)
    return metrics[-1] if metrics else Metrics(float("nan"), float("nan"))


def main() -> int:
    """Read the flags, and train with the learner's code or the reference's."""
    try:
        options = read_options()
        use_code(options.code)
        unit("imagenet_trainer").train(options)
    except (ValueError, OSError, CheckpointError, DiskError) as error:
        print(f"imagenet_trainer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
