"""The staging buffers of the primitives, and the scope in which they reuse them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_Kind = tuple[torch.dtype, torch.device]


class MemoryPool:
    """Keeps the flat buffers that no call is using, by dtype and device."""

    def __init__(self) -> None:
        self.num_allocated = 0
        """Buffers that were made because none was free and large enough."""
        self.num_reused = 0
        self.allocated_bytes = 0
        self._free: defaultdict[_Kind, list[Tensor]] = defaultdict(list)

    def take(self, numel: int, kind: _Kind) -> Tensor:
        """Take the smallest free buffer of at least `numel` elements, or make one."""
        free = self._free[kind]
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            self.num_reused += 1
            return free.pop(min(fitting, key=lambda i: free[i].numel()))
        self.num_allocated += 1
        dtype, device = kind
        buffer = torch.empty(numel, dtype=dtype, device=device)
        self.allocated_bytes += buffer.nbytes
        return buffer

    def put_back(self, buffer: Tensor) -> None:
        """Let another call use the buffer from now on."""
        self._free[buffer.dtype, buffer.device].append(buffer)


_POOLS: list[MemoryPool] = []


@contextmanager
def memory_pool_scope() -> Iterator[MemoryPool]:
    """Let the primitives reuse their staging buffers in this block.

    Outside of it, each call of reduce, scatter and reduce_scatter, and of all_reduce
    with MIN, MAX or PRODUCT, allocates buffers for its messages and frees them. Inside,
    we keep each buffer for the next call. No call ever returns a pooled buffer. The
    pool has the counters `num_allocated`, `num_reused` and `allocated_bytes`, and is
    freed at the end of the block.

    Example:
        init_process_group()
        with memory_pool_scope() as pool:
            for _ in range(10):
                all_reduce(torch.ones(1000), ReduceOp.MAX)
        assert (pool.num_allocated, pool.num_reused) == (1, 9)
    """
    pool = MemoryPool()
    _POOLS.append(pool)
    try:
        yield pool
    finally:
        _POOLS.remove(pool)


@contextmanager
def staging(numel: int, example: Tensor) -> Iterator[Tensor]:
    """Make a flat buffer of `numel` elements with the dtype and device of `example`."""
    kind = example.dtype, example.device
    pool = _POOLS[-1] if _POOLS else MemoryPool()
    buffer = pool.take(numel, kind)
    try:
        yield buffer[:numel]
    finally:
        pool.put_back(buffer)
