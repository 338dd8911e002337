"""Every call of torch.distributed with its result: for real and for simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.runner import RankContext


def on_gloo(context: RankContext, file: str) -> dict[str, Any]:
    """`everything` on a real rank; `file` is where the ranks find each other."""
    rank, n = context.comm.rank, context.comm.world_size
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=n)
    return everything()


def everything() -> dict[str, Any]:
    """The result of each call on this rank; for any number of ranks above 1."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return {
        **_collectives(rank, n),
        **_singles(rank, n),
        **_all_to_alls(rank, n),
        **_messages(rank, n),
        **_objects(rank, n),
        **_groups(rank, n),
    }


def _mine(rank: int) -> Tensor:
    return torch.tensor([[rank + 1.0, 2.0 * rank], [3.0, -rank]])


def _collectives(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        tensor = _mine(rank)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = tensor.tolist()
    turned = _mine(rank).t()  # dense, but not in the order of its rows
    work = dist.all_reduce(turned, async_op=True)
    assert work is not None
    work.wait()
    found["all_reduce of a transpose"] = turned.tolist()
    tensor = _mine(rank)
    dist.broadcast(tensor, src=1)
    found["broadcast"] = tensor.tolist()
    tensor = _mine(rank)
    dist.reduce(tensor, dst=n - 1)
    found["reduce"] = tensor.tolist() if rank == n - 1 else None
    gathered = [torch.empty(2, 2) for _ in range(n)]
    dist.all_gather(gathered, _mine(rank))
    found["all_gather"] = [part.tolist() for part in gathered]
    into = [torch.empty(2, 2) for _ in range(n)] if rank == 1 else None
    dist.gather(_mine(rank), into, dst=1)
    found["gather"] = [part.tolist() for part in into or ()]
    part = torch.empty(2, 2)
    parts = [_mine(r) for r in range(n)] if rank == 1 else None
    dist.scatter(part, parts, src=1)
    found["scatter"] = part.tolist()
    part = torch.empty(2, 2)
    dist.reduce_scatter(part, [_mine(rank + r) for r in range(n)])
    found["reduce_scatter"] = part.tolist()
    dist.barrier()
    return found


def _singles(rank: int, n: int) -> dict[str, Any]:
    # Since torch 2.13 these have new names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gathered, part = torch.empty(2 * n, 2), torch.empty(2)
    gather(gathered, _mine(rank))
    scatter(part, torch.arange(2.0 * n) + rank)
    return {
        "all_gather_single": gathered.tolist(),
        "reduce_scatter_single": part.tolist(),
    }


def _all_to_alls(rank: int, n: int) -> dict[str, Any]:
    even = torch.empty(2 * n)
    dist.all_to_all_single(even, torch.arange(2.0 * n) + 100 * rank)
    sizes = [other + 1 for other in range(n)]
    uneven = torch.empty(sum(sizes))
    sent = torch.arange(n * (rank + 1.0)) + 100 * rank
    dist.all_to_all_single(uneven, sent, sizes, [rank + 1] * n)
    return {"all_to_all even": even.tolist(), "all_to_all uneven": uneven.tolist()}


def _messages(rank: int, n: int) -> dict[str, Any]:
    after, before = (rank + 1) % n, (rank - 1) % n
    tagged, batched = torch.empty(2), torch.empty(1)
    sending = dist.isend(torch.ones(2) * rank, after, tag=7)
    receiving = dist.irecv(tagged, before, tag=7)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    sending.wait()
    ops = [
        dist.P2POp(dist.isend, torch.tensor([10.0 * rank]), after),
        dist.P2POp(dist.irecv, batched, before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    source = None
    if rank == 0:
        source = dist.recv(torch.empty(1))
    elif rank == 1:
        dist.send(torch.ones(1), 0)
    return {
        "isend and irecv": tagged.tolist(),
        "batch_isend_irecv": batched.tolist(),
        "recv from anyone": source,
    }


def _objects(rank: int, n: int) -> dict[str, Any]:
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=1)
    given: list[Any] = [None]
    dist.scatter_object_list(given, list("abcdefgh"[:n]) if rank == 0 else None, src=0)
    collected: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object(rank * rank, collected, dst=0)
    return {
        "all_gather_object": gathered,
        "broadcast_object_list": told,
        "scatter_object_list": given,
        "gather_object": collected,
    }


def _groups(rank: int, n: int) -> dict[str, Any]:
    members = [0, n - 1]
    group = dist.new_group(members)
    tensor = _mine(rank)
    if rank in members:
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, src=n - 1, group=group)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("greeting", "hello")
    heard = store.get("greeting").decode()
    store.add("arrivals", 1)
    dist.barrier()
    return {
        "in a group": tensor.tolist(),
        "store": (heard, store.add("arrivals", 0)),
    }
