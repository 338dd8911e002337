"""Calls by which a script reaches out of its own code, as a simulated rank makes them.

    time            the user's code reads the clock of the simulation, and sleeps by it;
                    libraries go on reading this machine's
    signals, exit   no signal ever comes; what `atexit` is given runs when the rank
                    ends; `os._exit` ends the rank
    breakpoint()    stops the world: all ranks wait while one of them is looked at
    mp.spawn        the rank runs the function itself, as the process with its number
    threads         an asynchronous checkpoint is written where it is asked for
    workers         a DataLoader has none if the ranks would have more than 16 in all
    compilers       `torch.compile` gives back what it got: a program that runs eagerly

What cannot be done is refused in one sentence: more processes as ranks, sockets of its
own. The run's report names the line.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import os
import pdb
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from distlab.sim.torch.by_hand import replace_by_hand
from distlab.sim.torch.rank import Rank, here
from distlab.sim.torch.replacing import Refused, Replaced

MAX_WORKERS = 16
"""DataLoader workers of all ranks together; each is a process of this machine."""
_LOOK_S = 1e-7  # that a look at the clock takes: or else a loop would never end
_torch: Any = torch


class LeftError(SystemExit):
    """A rank that called `os._exit`."""


@contextmanager
def as_if_alone() -> Iterator[None]:
    """While it lasts, a rank may do these things as if it had a process to itself."""
    replaced = Replaced()
    try:
        _replace_clocks(replaced)
        _replace_ends(replaced)
        _replace_processes(replaced)
        _replace_threads(replaced)
        _refuse(replaced)
        replace_by_hand(replaced)
        replaced.put(sys, "breakpointhook", _stop_the_world(sys.breakpointhook))
        yield
    finally:
        replaced.undo()


def _live_rank() -> Rank | None:
    """The rank that calls, in the process of the simulation."""
    rank = here()
    return None if rank is None or rank.is_forked else rank


# ── time ────────────────────────────────────────────────────────────────────────────


def _replace_clocks(replaced: Replaced) -> None:
    began_s = time.time()
    for name, start_s in (("time", began_s), ("perf_counter", 0), ("monotonic", 0)):
        replaced.put(time, name, _clock(getattr(time, name), start_s, 1.0, float))
        both = f"{name}_ns"
        replaced.put(time, both, _clock(getattr(time, both), start_s, 1e9, round))
    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        rank = _live_rank()
        if rank is None or not rank.is_users(sys._getframe(1)):
            real_sleep(seconds)
        else:
            rank.settle()
            rank.clock.sleep(seconds)

    replaced.put(time, "sleep", sleep)


def _clock(real: Any, start_s: float, per_s: float, kind: Any) -> Callable[[], Any]:
    def now() -> Any:
        rank = _live_rank()
        if rank is None or not rank.is_users(sys._getframe(1)):
            return real()
        rank.clock.sleep(_LOOK_S)
        return kind((start_s + rank.now_s()) * per_s)

    return now


# ── the end of a rank ───────────────────────────────────────────────────────────────


def _replace_ends(replaced: Replaced) -> None:
    def exit_at_once(original: Any, status: int) -> Any:
        if _live_rank() is None:
            original(status)
        raise LeftError(status)

    def at_exit(function: Any, *args: Any, **kwargs: Any) -> Any:
        rank = _live_rank()
        if rank is not None:
            rank.at_exit.append(lambda: function(*args, **kwargs))
        return function

    replaced.for_ranks(signal, "signal", lambda number, act: signal.SIG_DFL)
    replaced.with_original(os, "_exit", exit_at_once)
    replaced.for_ranks(atexit, "register", at_exit)


# ── processes for the ranks of a node ───────────────────────────────────────────────


def _replace_processes(replaced: Replaced) -> None:
    """Let a script that starts its node's ranks itself run on each of these ranks.

    Each simulated rank executes the script from the start, as under torchrun. Where the
    script calls `mp.spawn(fn, args, nprocs)`, it has come to what it wants done on each
    rank, and runs `fn` as the process whose number is its local rank.
    """
    for name in ("spawn", "start_processes"):
        replaced.for_ranks(_torch.multiprocessing, name, partial(_spawn_here, name))
    for owner in (multiprocessing, _torch.multiprocessing):
        # Once per process; and a worker that isn't forked wouldn't find `__main__`.
        replaced.for_ranks(owner, "set_start_method", lambda *args, **kwargs: None)


def _spawn_here(
    name: str,
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *others: Any,
    **options: Any,
) -> _Ended | None:
    """See `torch.multiprocessing.spawn`.

    Raises:
        Refused: there are fewer ranks on the node.
    """
    rank = here()
    assert rank is not None
    if nprocs > rank.per_node:
        raise Refused(
            f"mp.{name} of {nprocs} processes can't be simulated, because a node has "
            f"only {rank.per_node} ranks: simulate more, or start fewer processes"
        )
    number = rank.number % rank.per_node
    if number < nprocs:
        fn(number, *args)
    return None if join else _Ended()


class _Ended:
    """The processes that were spawned without waiting for them: they have ended."""

    def join(self, timeout: float | None = None, **options: Any) -> bool:
        """Whether all of them have ended: yes."""
        return True


# ── threads, workers, compilers ─────────────────────────────────────────────────────


def _replace_threads(replaced: Replaced) -> None:
    from torch.distributed.checkpoint import _async_thread_executor as executor

    kind: Any = executor._ThreadBasedAsyncCheckpointExecutor

    def save_now(this: Any, staged: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(executor.save_wrapper(staged, **options))
        except Exception as error:
            future.set_exception(error)
        return future

    def fewer_workers(original: Any, this: Any, *args: Any, **kwargs: Any) -> None:
        rank = _live_rank()
        asked = kwargs.get("num_workers", 0)
        if rank is not None and asked * rank.world_size > MAX_WORKERS:
            kwargs |= {"num_workers": 0, "persistent_workers": False}
            kwargs.pop("prefetch_factor", None)
            kwargs.pop("multiprocessing_context", None)
            kwargs.pop("timeout", None)
            rank.notes.add(
                f"a DataLoader's {asked} workers are left out: {rank.world_size} ranks "
                f"would start {asked * rank.world_size} processes"
            )
        original(this, *args, **kwargs)

    def eager(model: Any = None, **options: Any) -> Any:
        rank = here()
        assert rank is not None
        rank.notes.add("torch.compile is left out: what it was given runs eagerly")
        return (lambda given: given) if model is None else model

    def eager_module(module: Any, *args: Any, **options: Any) -> None:
        eager(module)

    replaced.for_ranks(kind, "execute_save", save_now)
    replaced.with_original(torch.utils.data.DataLoader, "__init__", fewer_workers)
    replaced.for_ranks(_torch, "compile", eager)
    replaced.for_ranks(torch.nn.Module, "compile", eager_module)


# ── what is refused ─────────────────────────────────────────────────────────────────


def _refuse(replaced: Replaced) -> None:
    replaced.with_original(multiprocessing.process.BaseProcess, "start", _only_workers)
    replaced.with_original(socket.socket, "listen", _no_sockets)


def _only_workers(original: Any, process: Any) -> None:
    """A DataLoader's workers are processes; other ones would be ranks, or talk to them.

    Raises:
        Refused: the process is none of them.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
            original(process)
            return
    raise Refused(
        "a process that a rank starts can't be simulated: call its function instead, "
        "or leave it out"
    )


def _no_sockets(original: Any, this: Any, *args: Any) -> None:
    rank = _live_rank()
    if rank is None or not rank.is_users(sys._getframe(2)):
        original(this, *args)
        return
    raise Refused(
        "socket.listen can't be simulated: what goes over sockets of its own takes no "
        "virtual time. Use torch.distributed"
    )


# ── breakpoint() ────────────────────────────────────────────────────────────────────


def _stop_the_world(original: Any) -> Any:
    def stop(*args: Any, **kwargs: Any) -> None:
        rank = _live_rank()
        if rank is None:
            original(*args, **kwargs)
            return
        out = sys.__stdout__ or sys.stdout
        with suppress(OSError):
            out.write(
                f"rank {rank.number} of {rank.world_size} is at a breakpoint, at "
                f"{rank.now_s():.6f} s; all other ranks wait\n"
            )
        pdb.Pdb(stdin=sys.__stdin__, stdout=out).set_trace(sys._getframe(1))

    return stop
