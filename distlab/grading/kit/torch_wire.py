"""What torch.distributed was asked to send, whoever asked: Python, DDP or FSDP.

Every collective of a process group is an operator of torch's dispatcher, also those
that DistributedDataParallel starts from C++. A dispatch mode sees each of them on the
thread that starts it. What a future's callback starts on gloo's thread is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HALF = ("_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_")
# An all_reduce is a reduce_scatter and an all_gather: each sends half as much.


class Wire(TorchDispatchMode):
    """While it is entered: a record of each collective that carries float numbers.

    A record has its `name`, `dtype`, the `elements` of its largest tensor, and the
    `ranks` of its group. `seen` is called with the number of records so far.
    """

    def __init__(self, seen: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[dict[str, Any]] = []
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        done = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note(func._opname, args)
        return done

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if not any(tensor.is_floating_point() for tensor in tensors):
            return  # how torch's DDP agrees on its buckets
        largest = max(tensors, key=Tensor.numel)
        self.records.append(
            {
                "name": name,
                "dtype": str(largest.dtype),
                "elements": largest.numel(),
                "ranks": _ranks_of(args),
            }
        )
        if self._seen is not None:
            self._seen(len(self.records))


def elements_of(records: Sequence[dict[str, Any]]) -> float:
    """How many elements all_reduces would have that send as much as these calls."""
    return sum(
        int(record["elements"]) / (2 if record["name"] in _HALF else 1)
        for record in records
    )


def _ranks_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
            return tuple(dist.get_process_group_ranks(group))
    return ()
