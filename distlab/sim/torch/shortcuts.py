"""What torch works out on each rank although the answer is the same on all of them.

Each takes its time once per rank, or even once per rank and rank, which is nothing on
one GPU and most of the time when one process plays 256 of them. While a run lasts, the
answer is kept:

    _propagate_tensor_meta_non_cached    the shape that comes out of an operator on
                                         DTensors, worked out once per thread
    _chunk_with_empty                    FSDP2's shards of a parameter; for a small one
                                         most are empty, and one empty tensor will do

Private names of torch; one that a version lacks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_PROPAGATOR = "torch.distributed.tensor._sharding_prop"
_FSDP = "torch.distributed.fsdp._fully_shard"


@contextmanager
def taken() -> Iterator[None]:
    """Within the block, torch takes these short cuts."""
    with ExitStack() as stack:
        propagator = getattr(import_module(_PROPAGATOR), "ShardingPropagator", None)
        _replace(stack, propagator, "_propagate_tensor_meta_non_cached", _remembered)
        for name in ("_fsdp_common", "_fsdp_param"):
            module = import_module(f"{_FSDP}.{name}")
            _replace(stack, module, "_chunk_with_empty", lambda before: _chunks)
        yield


def _replace(
    stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]
) -> None:
    before = getattr(owner, name, None)
    if before is not None:
        stack.callback(setattr, owner, name, before)
        setattr(owner, name, make(before))


def _chunks(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    missing = num_chunks - len(chunks)
    return chunks + [chunks[0].new_empty(0)] * missing if missing else chunks


# ── shapes of operators on DTensors ─────────────────────────────────────────────────


def _remembered(before: Callable[..., Any]) -> Callable[..., Any]:
    answers: dict[Any, Any] = {}

    @wraps(before)
    def propagate(self: Any, schema: Any) -> Any:
        key = (
            schema.op,
            torch.get_default_dtype(),
            _plain(schema.args_schema),
            _plain(tuple(schema.kwargs_schema.items())),
        )
        try:
            if key not in answers:
                answers[key] = before(self, schema)
        except TypeError:  # it can't be hashed
            return before(self, schema)
        return answers[key]

    return propagate


def _plain(value: Any) -> Any:
    """An argument without the mesh, of which every rank has its own."""
    meta = getattr(value, "tensor_meta", None)
    if meta is not None:
        return meta
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(_plain, value))
    return type(value), value
