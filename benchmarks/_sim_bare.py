"""The least that a message costs: one switch of greenlets and, of data, one copy.

The ring programs that `benchmarks/sim.py` times run here on greenlets in a circle.
`sendrecv` shows what it sends and enters the next one; entered again, it takes what its
left neighbor has shown. There is no clock, no network, no matching of ends, and nobody
who notices a hang. What a simulator adds to that is its own; less it cannot take.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import greenlet  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import Tensor

from distlab.sim.messages import move

OBJECTS = 50_000  # as in the simulator: made before Python looks for those that can go


class BareComm:
    """One in the circle, for programs that talk to their neighbors, all in step."""

    def __init__(self, rank: int, world_size: int, enter_next: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.enter_next = enter_next
        self.left = self
        self.shown: list[Any] = [None, None]  # of this step and of the one before
        self._step = 0

    def sendrecv(self, send: Any, dst: int, receive: Any, src: int) -> None:
        """Of the neighbors: `dst` is to the right, `src` to the left."""
        self._step = step = self._step ^ 1
        self.shown[step] = send
        self.enter_next()
        if isinstance(receive, Tensor):
            came = self.left.shown[step]
            move(receive.data_ptr(), came.data_ptr(), came.nbytes)


def bare(program: Callable[..., Any], n: int, *args: Any) -> tuple[float, list[Any]]:
    """Processor seconds of `program(context, *args)` on n ranks, and what it returned.

    The arguments are shared: a tensor among them is to be of no importance.
    """
    hub = greenlet.getcurrent()
    comms = [BareComm(rank, n, hub.switch) for rank in range(n)]
    values: list[Any] = [None] * n

    def live(comm: BareComm) -> None:
        values[comm.rank] = program(SimpleNamespace(comm=comm), *args)

    strands = [greenlet.greenlet(live) for _ in comms]
    threads, collecting = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(OBJECTS, *collecting[1:])
    started = time.process_time()
    try:
        for strand, comm in zip(strands, comms, strict=True):
            strand.switch(comm)  # until its first step
        for rank, comm in enumerate(comms):
            comm.left = comms[rank - 1]
            comm.enter_next = strands[(rank + 1) % n].switch
        for strand in strands:
            strand.switch()  # the first one sets all going; each ends here
        return time.process_time() - started, values
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*collecting)
