"""The communicator of a rank that was started again while the others went on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch

from distlab.comm import Call, Comm, CommRefusedError, Wrapper

T = TypeVar("T")


class NewcomersComm(Wrapper):
    """Knows its rank and refuses every call: the others know its old process only.

    A rank that was started again can call and serve by its endpoint, and use the store.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        """See `Comm.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See `Comm.world_size`."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """See `Comm.local_rank`."""
        return self._rank

    @property
    def device(self) -> torch.device:
        """See `Comm.device`."""
        return torch.device("cpu")

    def time(self) -> float:
        """See `Comm.time`."""
        return time.monotonic()

    def abort(self) -> None:
        """See `Comm.abort`: there is nothing to give up."""

    def _around(self, call: Call, proceed: Callable[[], T]) -> NoReturn:
        raise CommRefusedError(
            f"rank {self._rank} was started again, and the others' communicator does "
            f"not have it: comm.{call.op} is not available, only endpoint and store"
        )

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> NoReturn:
        raise AssertionError("a newcomer makes no group")
