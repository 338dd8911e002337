"""Checkpoints that you can read again after a crash at any moment.

Guide: phase4_production/guide/fault_tolerance.md.
Source: T. Pillai et al., All File Systems Are Not Created Equal (OSDI 2014), section 2;
J. Mohan et al., CheckFreq (FAST 2021), section 4, for saving while the model trains.
Symbols: n = comm.world_size; S = the bytes of the state.
Cost: each rank writes a shard of about S / n, and sends a few hundred bytes.

    rank 0   write, sync, rename, sync_folder ─┐ SHA-256         the manifest:
    rank 1   write, sync, rename, sync_folder ─┼────────> rank 0 the commit ──> all
    rank 2   write, sync, rename, sync_folder ─┘                                return

`disk` is one folder that all ranks share. A crash of the machine may undo or tear what
was written before sync(name), and what was named, renamed or removed before
sync_folder(). Names and formats are given: distlab/checkpoints/files.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoints import files as given
from distlab.checkpoints import training_state
from distlab.checkpoints.files import JSON, TEMPORARY, Checkpoint, CheckpointError
from distlab.checkpoints.training_state import Run, State
from distlab.comm import Comm, Disk, DiskError


def write_file(disk: Disk, name: str, data: bytes) -> None:
    """Write a file that after a crash at any moment has all of `data` or doesn't exist.

    Given: name + TEMPORARY, the name while you write it.

    C1 When `write_file` returns, both the data and the name are durable. Until then, an
       existing file with that name stays intact.
    Check: distlab check 4.3
    """
    # TODO(fault_tolerance.save)
    # four calls of `disk`, in one order: which one makes what durable?
    raise NotImplementedError("fault_tolerance.save")


def remove_old(disk: Disk, step: int, keep: int) -> None:
    """Remove the files of steps up to `step` that no kept checkpoint needs.

    Given: given.manifest_steps(names), given.step_of(name), given.decode_manifest.

    C5 The newest `keep` manifests up to `step` are kept, together with the files they
       name. A manifest that can't be decoded doesn't count and is removed. Files from
       later steps are kept, and so are files for which step_of returns None.
    Example: keep 2, steps 10 20 30 → 20 and 30 stay. Check: distlab check 4.3
    """
    # TODO(fault_tolerance.save)
    # which names stay? all others of these steps go, also what a crash left behind
    raise NotImplementedError("fault_tolerance.save")


def save(
    comm: Comm,
    disk: Disk,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, JSON],
    keep: int = 2,
) -> None:
    """Save a checkpoint: first a shard of each rank, then the manifest.

    Collective; `step` and `keep` >= 1 are equal on all ranks, `tensors` and `meta` are
    this rank's. Given: given.exchange(comm, value) returns the values of all ranks.

    C2 Rank 0 writes the manifest, which lists the record of each rank's shard in rank
       order. A manifest must never exist while a crash could still undo one of its
       shards.
    C3 Once `save` returns on any rank, the checkpoint is complete.
    C4 An error on one rank, such as a full disk or a dtype that no shard can store,
       raises CheckpointError on every rank. The message names the rank and the error,
       and no rank waits forever.
    Rank 0 then calls remove_old, even after an error, because that makes room. You are
    free to treat an error of remove_old itself as one of save, or not to.
    In torch.distributed: torch.distributed.checkpoint.save, see 4.17
    Cost: two exchanges. Check: distlab check 4.3
    """
    # TODO(fault_tolerance.save)
    # given.encode_shard, record_of, encode_manifest. what must every rank hear of?
    raise NotImplementedError("fault_tolerance.save")


def load(disk: Disk) -> Checkpoint | None:
    """Load the newest complete checkpoint; None if there is no manifest at all.

    Given: given.decode_manifest and decode_shard raise ValueError.

    C1 `load` loads the highest step whose shards all exist with the recorded size and
       SHA-256, and whose manifest and file name agree about the step. It returns the
       shards in rank order and writes nothing to the disk.
    C2 For each higher step, `refused` contains one line that names the missing or
       damaged file and gives the reason.
    C3 If there are manifests but no complete checkpoint, `load` raises CheckpointError
       with the lines of `refused`, because training must not silently restart from step
       0.
    In torch.distributed: torch.distributed.checkpoint.load, which has no fallback
    Example: a shard of step 30 is torn → step 20. Check: distlab check 4.4
    """
    # TODO(fault_tolerance.load)
    # what may raise while one checkpoint is read, and what is tried then?
    raise NotImplementedError("fault_tolerance.load")


def full_state(run: Run) -> tuple[State, State]:
    """Return all a run needs to continue as if it had never stopped: (shared, own).

    Each entry is in one of the two: "parameters" and "buffers" by name, a tied one
    once; "master" in order; "optimizer"; each of run.parts by its name; "random"; if
    the hook has them, "factors" and "residuals". Given: state_dict(), of hook.residuals
    and hook.factors state_dict(run.model); training_state.random_state.

    C1 `shared` holds everything that is identical on all ranks after each step, and
       only one copy of it is saved.
    C2 `own` holds everything that may differ between ranks. For example, batch norm
       counts only its own rank's samples, and a sharded optimizer (run.is_sharded)
       knows only its own shards.
    In torch.distributed: get_state_dict, for the model and the optimizer only
    Cost: no message, no copy. Check: distlab check 4.5
    """
    # TODO(fault_tolerance.full_state)
    # for each entry: who else has it? what is lost if only rank 0's is saved?
    raise NotImplementedError("fault_tolerance.full_state")


def restore(run: Run, shared: State, owns: list[State], rank: int, size: int) -> None:
    """Continue on `size` ranks from what full_state returned: `owns` on each rank.

    `run` was made like the saved one. If the model has other parameters or buffers,
    training_state.require_same_model raises ValueError before it is changed.

    C3 On the same number of ranks, all later steps are bit-for-bit the same as if the
       run had not been interrupted.
    C4 On a different number of ranks, a sharded optimizer loads the list of all ranks'
       states. Each rank takes rank 0's buffers and the mean of all residuals, and gets
       random numbers that differ from every other rank's.
    Given: training_state.set_random_state, seed_all; load_state_dict(state), of
    hook.residuals and hook.factors load_state_dict(run.model, state). Whatever is
    loaded may draw random numbers. Check: distlab check 4.5
    """
    # TODO(fault_tolerance.full_state)
    # item by item; copy_ under no_grad keeps each parameter the same object. random
    # numbers last: does anything before draw some?
    raise NotImplementedError("fault_tolerance.full_state")


class AsyncSaver:
    """Saves in a thread, so that training waits only while tensors are copied.

    All ranks construct it, and call save and wait in the same order.
    """

    def __init__(self, comm: Comm, disk: Disk, keep: int = 2) -> None:
        self.disk, self.keep = disk, keep
        # Its own group: these messages never meet those of training.
        self.comm = comm.new_group(range(comm.world_size))
        self.copies = given.Copies()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, JSON]
    ) -> None:
        """Start to save; once it returns, you may change `tensors` and `meta`.

        Collective. Given: self.copies.of(tensors), which uses its memory again.

        C1 The checkpoint contains the values that the tensors and `meta` had at the
           time of the call.
        C2 The call returns before the checkpoint is complete, and it sends its messages
           through self.comm.
        C3 At most one save is in progress at a time, so a call first waits for the
           previous save. If the previous save failed, the call raises its error once
           and doesn't save this step.
        In torch.distributed: torch.distributed.checkpoint.async_save
        Cost: a copy of the state. Check: distlab check 4.13
        """
        # TODO(fault_tolerance.async_save)
        # what must be done before this returns, and what can a thread do later?
        raise NotImplementedError("fault_tolerance.async_save")

    def run(self, step: int, tensors: dict[str, Tensor], meta: Any) -> None:
        """Save in the thread, and keep the error, if there is one."""
        # TODO(fault_tolerance.async_save)
        # an exception that leaves a thread is lost
        raise NotImplementedError("fault_tolerance.async_save")

    def wait(self) -> None:
        """Wait until no save is under way; raise the last one's error, once."""
        # TODO(fault_tolerance.async_save)
        # the error of an earlier save must not be raised again for a later one
        raise NotImplementedError("fault_tolerance.async_save")
