"""Treat SIGTERM as a notice that we'll lose the machine but can still save.

SLURM sends it before the time limit, Kubernetes sends it before it ends a pod, and a
launcher sends it before SIGKILL. All ranks must save the same step, but the signal
reaches them at different moments, and may reach only some of them. So they agree at the
end of each step.

    rank 0   step 41 │ step 42  ✉ │ 1 ┐ max = 1: all save step 42, and end
    rank 1   step 41 │ step 42    │ 0 ┘
"""

from __future__ import annotations

import signal
import threading

import torch

from distlab.comm import Comm, ReduceOp

SAVED = 128 + signal.SIGTERM
"""The exit code of a process that the notice ended, after it had saved."""


class Notice:
    """Remembers that SIGTERM came, so that the signal alone no longer ends the process.

    torchrun and SLURM send it to all processes of a rank. If it ended the data workers,
    the rank would end as well, before it has saved. So we block the signal, and all
    processes that are forked from now on inherit this. The signal stays pending until
    we look for it.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._has_come = comm, False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._remember)  # for threads that were here
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _remember(self, number: int, frame: object) -> None:
        self._has_come = True

    @property
    def is_here(self) -> bool:
        """Return True if the notice reached this rank."""
        return self._has_come or signal.SIGTERM in signal.sigpending()

    def is_anywhere(self) -> bool:
        """Return True if the notice reached any rank; collective, after each step."""
        flag = torch.tensor([self.is_here], dtype=torch.int32)
        flag = flag.to(self._comm.device)
        self._comm.all_reduce(flag, ReduceOp.MAX)
        return bool(flag)
