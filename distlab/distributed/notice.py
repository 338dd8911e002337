"""SIGTERM as a notice: the machine will be taken away, and the job may still save.

SLURM sends it before the time limit, Kubernetes before it ends a pod, a launcher before
SIGKILL. All ranks must save the same step, but the signal reaches them at different
moments, and perhaps only some of them. So they agree at the end of each step.

    rank 0   step 41 │ step 42  ✉ │ 1 ┐ max = 1: all save step 42, and end
    rank 1   step 41 │ step 42    │ 0 ┘
"""

from __future__ import annotations

import signal
import threading

import torch

from distlab.comm import Comm, ReduceOp

SAVED = 128 + signal.SIGTERM
"""The exit code of a process that has saved, and was then ended by the notice."""


class Notice:
    """Remembers that SIGTERM came; from now on the signal alone ends nothing.

    torchrun and SLURM send it to all processes of a rank. Data workers that it ended
    would end the rank, before it has saved. So the signal is blocked, which processes
    that are forked from now on inherit; it stays pending until it is looked for.
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
        """Whether it came to this rank."""
        return self._has_come or signal.SIGTERM in signal.sigpending()

    def is_anywhere(self) -> bool:
        """Whether it came to any rank; collective, at the end of a step."""
        flag = torch.tensor([self.is_here], dtype=torch.int32)
        flag = flag.to(self._comm.device)
        self._comm.all_reduce(flag, ReduceOp.MAX)
        return bool(flag)
