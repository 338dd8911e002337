"""Keep training when ranks die, join or leave: `elastic(state).steps(n)`.

    for step in dist.elastic({"model": model, "optimizer": optimizer}).steps(1000):
        with step:
            …                      a batch, backward(), optimizer.step()

Under `distlab.launch --standby K`, losing a peer ends the `with` block early. The ranks
then form their group again and take the newest complete step, and the loop continues
from there. Under any other launcher, a lost peer is an error as usual.

Cost, under --standby: in each step a copy of the state in memory, and three messages,
one of which contains the state that only this rank has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from distlab.checkpoints.files import CheckpointError
from distlab.checkpoints.named_run import APART
from distlab.checkpoints.saved_run import (
    expect_shared,
    mark_of,
    merged,
    packed,
    resume,
)
from distlab.checkpoints.training_state import EXTRA, Run, State
from distlab.comm import DiskError, PeerLost, RealDisk, ReduceOp
from distlab.distributed import registry
from distlab.distributed.copies import (
    Holdings,
    Label,
    decode_own,
    encode_own,
    plan_of,
)
from distlab.distributed.group import default_comm
from distlab.distributed.notice import SAVED
from distlab.distributed.parts import running, unit
from distlab.distributed.regrouping import (
    FormError,
    RegroupingComm,
    pass_on,
)
from distlab.distributed.state_transfer import gather_state
from distlab.given.distributed_data_parallel import contiguous
from distlab.given.recovery import SAVE
from distlab.launch.control import Go


def elastic(
    state: Run | Mapping[str, Any],
    *,
    folder: str | Path | None = None,
    save_every: int | None = None,
) -> Elastic:
    """Train `state` in such a way that losing a rank costs no step; collective.

    `state` is a dict with "model" and "optimizer", and with anything else that changes
    from step to step and has a state_dict(), such as "scheduler" or "scaler". It may
    also be a `Run` of the unit fault_tolerance. Under --standby and --elastic, parts
    such as "scheduler" must be the same on all ranks.

    If you pass a `folder`, training begins at the newest complete checkpoint in it, and
    we save new ones every `save_every` steps and when SIGTERM arrives, after which the
    processes end with exit code 143. (While a group is being formed, there is no step
    that all ranks could save, so they end at once.) If a checkpoint can't be saved, we
    print a line to stderr and training continues.

    Raises:
        ValueError: `state` lacks a model or an optimizer; or under --standby or
            --elastic, the optimizer is sharded or a part differs between ranks.

    Example:
        init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = elastic({"model": model, "optimizer": optimizer})
        for step in training.steps(3):
            with step:
                optimizer.zero_grad()
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
        assert training.completed == 3
    """
    return Elastic(_as_run(state), folder, save_every)


class StepAttempt:
    """One attempt at a step; run everything that belongs to the step in its `with`."""

    def __init__(self, training: Elastic, index: int) -> None:
        self.index = index
        """Return the number of steps completed before this one."""
        self.is_entered = False
        self._training = training

    def __enter__(self) -> StepAttempt:
        self.is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return self._training._complete()
        return self._training._is_recovered(error)


class Elastic:
    """A training whose group may change between two steps or within one."""

    def __init__(
        self, run: Run, folder: str | Path | None, save_every: int | None
    ) -> None:
        if save_every is not None and (folder is None or save_every < 1):
            raise ValueError("save_every must be at least 1, and needs a folder")
        self.run = run
        self.completed = 0
        """The newest step that all ranks have completed."""
        self.grad_accum_steps = 1
        self._disk = None if folder is None else RealDisk(folder)
        self._save_every = save_every
        self._comm = default_comm()
        self._group = self._comm if isinstance(self._comm, RegroupingComm) else None
        if self._group is not None and run.is_sharded:
            raise ValueError(
                "elastic() cannot keep a sharded optimizer while ranks come and go; "
                "start it without --standby and --elastic, with a folder"
            )
        self._holds = Holdings()
        self._must_stop = False
        self._is_between = False  # between two groups
        self._times: dict[str, float] = {}
        self._mark = 0  # checksum of the parts after the newest step

    def steps(self, num_steps: int) -> Iterator[StepAttempt]:
        """Yield attempts until `num_steps` steps are complete, repeating a lost step.

        Raises:
            RuntimeError: a step's block was not run with `with step:`.
        """
        self._begin()
        while self.completed < num_steps or not self._is_over():
            if self.completed >= num_steps:
                continue
            step = StepAttempt(self, self.completed)
            yield step
            if not step.is_entered:
                raise RuntimeError("the body of the loop must be in `with step:`")

    # ── the beginning ───────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        if self._disk and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._group is None:
            self._first_state()
        elif not self._group.is_set_up:
            self._warm_up()
            self._group.member.say(ready=True)
            self._regroup()

    def _warm_up(self) -> None:
        """Do slow set-up work now, while no rank has to wait for this process."""
        _, own = self._state()
        decode_own(encode_own(own))
        assert unit("fault_tolerance").restore

    def _first_state(self) -> None:
        """Load the newest checkpoint, or take the state that rank 0 constructed."""
        disk = self._disk
        if disk is not None:
            tasks = unit("fault_tolerance")
            found = resume(
                self._comm, tasks, lambda: disk, self.run, within=_saying_whose_code
            )
            if found is not None:
                self.completed = found.step
                for line in found.refused:
                    self._say(f"skipped a newer checkpoint: {line}")
                return
        model = self.run.model
        tensors = (*model.parameters(), *model.buffers(), *self.run.master)
        for tensor in contiguous(tensors):
            self._comm.broadcast(tensor, 0)

    def _on_sigterm(self, number: int, frame: object) -> None:
        if self._group and not self._group.is_set_up:  # it has no rank, and no state
            sys.exit(128 + number)
        self._must_stop = True
        if self._is_between:  # the others do not come: what is saved is what there is
            sys.exit(SAVED)

    def _is_over(self) -> bool:
        """Return True if all ranks have completed the last step; if not, regroup."""
        if self._group is None or self._group.member.wait_until_over():
            return True
        self._regroup()
        return False

    # ── a step is complete ──────────────────────────────────────────────────────────

    def _complete(self) -> bool:
        """Wait until all ranks have completed the step; return True if they haven't."""
        try:
            self._commit(self.completed + 1)
        except (PeerLost, RuntimeError) as error:
            if not self._is_recovered(error):
                raise
        return True

    def _commit(self, step: int) -> None:
        flags = torch.zeros(4, dtype=torch.int64, device=self._comm.device)
        if self._group is not None:
            self._copy(step)
            flags[1] = self._group.member.must_regroup
            flags[2] = self._mark
            flags[3] = -self._mark
        flags[0] = self._must_stop
        if self._group is not None or self._disk is not None:
            self._comm.all_reduce(flags, ReduceOp.MAX)
        must_stop, must_regroup, most, least = flags.tolist()
        if most != -least:
            raise ValueError(
                f"after step {step} the parts {', '.join(self.run.parts)} differ "
                "between ranks, but elastic() keeps only one state of each for all "
                "ranks: leave out parts that each rank has for itself"
            )
        # Here every rank has a copy of this step, and of the rank before.
        self.completed = step
        if self._group is not None:
            self._group.page.completed(step)
            self._report_times()
        is_due = self._save_every and step % self._save_every == 0
        if self._disk is not None and (is_due or must_stop):
            self._save()
        if must_stop:
            sys.exit(SAVED)
        if must_regroup:
            self._regroup()

    def _copy(self, step: int) -> None:
        assert self._group is not None
        comm = self._comm
        label = Label(step, self._group.generation)
        shared, own = self._state()
        self._mark = mark_of({name: shared.get(name) for name in self.run.parts})
        slot = self._holds.copy(label, comm.rank, comm.world_size, shared, own)
        slot.shift = self._group.shift
        if comm.world_size > 1:
            slot.theirs = pass_on(comm, slot.own, slot.shift)
        else:
            slot.theirs = b"alone"

    def _save(self) -> None:
        comm, tasks, disk = self._comm, unit("fault_tolerance"), self._disk
        assert disk is not None
        group = self._group
        saving = group.page.during(SAVE) if group else contextlib.nullcontext()
        try:
            with saving:
                state = packed(comm, tasks, self.run, within=_saying_whose_code)
                with running(CheckpointError):
                    tasks.save(comm, disk, self.completed, *state)
                expect_shared(comm, disk, self.completed)
        except CheckpointError as error:  # on all ranks: none of them has to stop
            self._say(f"training continues without a checkpoint: {error}")

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(text, file=sys.stderr, flush=True)

    # ── a peer is lost ──────────────────────────────────────────────────────────────

    def _is_recovered(self, error: BaseException) -> bool:
        """If the error means a lost peer, form the next group and take its state."""
        group = self._group
        if group is None or not isinstance(error, PeerLost | RuntimeError):
            return False
        if not isinstance(error, PeerLost) and not group.member.must_regroup:
            return False
        self._times = {"lost_s": time.monotonic()}
        self._regroup()
        return True

    def _regroup(self) -> None:
        assert self._group is not None
        group = self._group
        while True:
            group.leave()
            with group.page.waiting():
                go = self._join()
                self._times["joined_s"] = time.monotonic()
                try:
                    group.form(go)
                    self._times["formed_s"] = time.monotonic()
                    self._take(go)
                    break
                except (FormError, PeerLost) as error:
                    group.member.say(failed=go.number, why=str(error))
        self._times |= {"restored_s": time.monotonic(), "generation": go.generation}
        group.member.say(formed=go.number, step=self.completed)

    def _join(self) -> Go:
        """Wait for the next group; after SIGTERM there will be none, so end instead."""
        assert self._group is not None
        self._is_between = True
        if self._must_stop:
            sys.exit(SAVED)
        go = self._group.member.join(self._report)
        self._is_between = False
        return go

    def _report(self) -> dict[str, Any]:
        return {"step": self.completed, "holds": self._holds.report()}

    def _report_times(self) -> None:
        """Report the times of a regrouping, after the first step of a generation."""
        if self._times and self._group is not None:
            times, self._times = self._times, {}
            self._group.member.say(
                times=times | {"completed_s": time.monotonic()}, step=self.completed
            )

    def _take(self, go: Go) -> None:
        """Bring this rank to the step of all ranks of the new group; collective."""
        assert self._group is not None
        _write_into(go.log)
        self.grad_accum_steps = go.grad_accum_steps
        for wrapper in registry.alive():
            getattr(wrapper, "reset", lambda: None)()
        plan = plan_of([report["holds"] for report in go.reports], go.source)
        if plan is None:
            self._first_state()
        else:
            self._restore(*gather_state(self._comm, self._holds, plan))
            self.completed = plan.label.step
            self._holds.forget_after(self.completed)
        self._group.page.completed(self.completed)
        self._copy(self.completed)
        self._comm.barrier()

    def _restore(self, shared: State, owns: list[State]) -> None:
        rank, size = self._comm.rank, self._comm.world_size
        shared = merged(shared, owns, rank, size, self.run)
        with running():
            unit("fault_tolerance").restore(self.run, shared, owns, rank, size)

    def _state(self) -> tuple[State, State]:
        """Call full_state, but treat the modules' extra state as each rank's own."""
        with running():
            shared, own = unit("fault_tolerance").full_state(self.run)
        if EXTRA in shared:
            own[APART] = {EXTRA: shared.pop(EXTRA)}
        return shared, own


def _saying_whose_code() -> contextlib.AbstractContextManager[None]:
    return running(CheckpointError, DiskError, ValueError)


def _as_run(state: Run | Mapping[str, Any]) -> Run:
    if isinstance(state, Run):
        return state
    parts = dict(state)
    model, optimizer = parts.pop("model", None), parts.pop("optimizer", None)
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "state_dict"):
        raise ValueError('state must have a "model" and an "optimizer"')
    return Run(model=model, optimizer=optimizer, parts=parts)


def _write_into(log: str) -> None:
    """Send this process's output to the log of its rank from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
