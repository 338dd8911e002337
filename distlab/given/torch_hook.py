"""Use hooks of unit gradient_compression with torch's DistributedDataParallel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Comm, TorchComm, Work
from distlab.given.compression import FlatBucket

Hook = Callable[[Comm, Any], Work]


class _TwoGroups:
    """A communicator with one group for the thread of backward(), one for the other.

    torch numbers the collectives of a group in the order in which they start. The first
    halves start in the order of the buckets, and so do the second halves, but the ranks
    interleave the two differently. That is why each half has its own group.
    """

    def __init__(self, first: Comm, second: Comm) -> None:
        self._first, self._second = first, second
        self.worker: int | None = None

    def __getattr__(self, name: str) -> Any:
        is_second = threading.get_ident() == self.worker
        return getattr(self._second if is_second else self._first, name)


def torch_hook(hook: Hook, comm: Comm | None = None) -> Callable[..., Any]:
    """Turn `hook` into an argument of `model.register_comm_hook(None, …)`; collective.

    It is collective because it creates a new group. backward() calls `hook` with each
    bucket, while another thread calls wait() on the Works, one bucket after another. So
    backward() continues, no matter what wait() is waiting for. If `comm` is None, we
    use torch's default process group. Tested with gloo.
    """
    comm = comm or TorchComm.from_default()
    n = comm.world_size
    second = comm.new_group(list(range(n)))
    assert second is not None  # all ranks are members
    both: Any = _TwoGroups(comm, second)
    # One thread: the second halves follow the order of the buckets on every rank.
    pool = ThreadPoolExecutor(1, "second-half")
    both.worker = pool.submit(threading.get_ident).result()

    # torch compares annotations with its classes; here they are strings. So none.
    def registered(state, bucket):  # type: ignore[no-untyped-def]
        # Divide first, as torch does: a float16 sum may overflow even if the mean fits.
        given = FlatBucket(bucket.parameters(), bucket.buffer().div_(n))
        work = hook(both, given)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        pool.submit(_finish, work, given.flat, future)
        return future

    return registered


def _finish(work: Work, flat: Tensor, future: Any) -> None:
    try:
        work.wait()
        future.set_result(flat)
    except BaseException as error:
        future.set_exception(error)
