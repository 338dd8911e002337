"""What every transport must be able to do, as programs that run on ranks.

Each is a module-level function of a `RankContext` and returns plain values; what they
must be is written in `test_comm_conformance.py`. Nothing here knows the transport.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.comm import ANY, Comm, CommRefusedError, PeerLost, ReduceOp
from distlab.runner import RankContext

DTYPES = (
    "bool",
    "uint8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except CommRefusedError as error:
        return str(error)
    return "was not refused"


def loss(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except PeerLost as error:
        return {
            "rank": error.rank,
            "peer": error.peer,
            "step": error.step,
            "waited_s": error.waited_s,
            "text": str(error),
        }
    return {"rank": None}


def zeros(comm: Comm, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=comm.device)


def filled(comm: Comm, value: float, *shape: int) -> Tensor:
    return torch.full(shape, float(value), device=comm.device)


def idle(ctx: RankContext) -> None:
    """Nothing: a rank that only starts and ends."""


# ── point to point ──────────────────────────────────────────────────────────────────


def who_am_i(ctx: RankContext) -> list[Any]:
    comm = ctx.comm
    return [comm.rank, comm.world_size, comm.local_rank, comm.device.type]


def everyone_sends_to_zero(ctx: RankContext) -> list[list[float]]:
    comm = ctx.comm
    if comm.rank:
        comm.send(filled(comm, 10 * comm.rank, 2, 3), 0)
        return []
    got = []
    for src in range(1, comm.world_size):
        box = zeros(comm, 2, 3)
        assert comm.recv(box, src) == src
        got.append([src, float(box.min()), float(box.max())])
    return got


def tags_out_of_order(ctx: RankContext) -> list[float]:
    """Rank 0 posts tags 1, 2, 3; rank 1 takes 3, 1, 2."""
    comm = ctx.comm
    if comm.rank == 0:
        works = [comm.isend(filled(comm, tag, 4), 1, tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
        return []
    got = []
    for tag in (3, 1, 2):
        box = zeros(comm, 4)
        comm.recv(box, 0, tag)
        got.append(float(box[3]))
    return got


def first_in_first_out(ctx: RankContext) -> list[float]:
    comm, count = ctx.comm, 20
    if comm.rank == 0:
        for number in range(count):
            comm.send(filled(comm, number, 1 + number % 5), 1)
        return []
    boxes = [zeros(comm, 1 + number % 5) for number in range(count)]
    for box in boxes:
        comm.recv(box, 0)
    return [float(box[-1]) for box in boxes]


def from_anyone(ctx: RankContext) -> list[list[float]]:
    """Rank 0 takes what comes; the source that is returned must be the sender's."""
    comm = ctx.comm
    if comm.rank:
        comm.send(filled(comm, 7 * comm.rank, 3), 0, tag=5)
        return []
    got = []
    for _ in range(comm.world_size - 1):
        box = zeros(comm, 3)
        src = comm.recv(box, ANY, tag=5)
        got.append([src, float(box[2])])
    return sorted(got)


def posted_and_waited(ctx: RankContext) -> list[list[list[float]]]:
    """Everyone to everyone with isend and irecv; waits in and against the order."""
    comm, got = ctx.comm, []
    peers = [peer for peer in range(comm.world_size) if peer != comm.rank]
    for turn, backwards in enumerate((False, True)):
        boxes = {peer: zeros(comm, 2) for peer in peers}
        mine = filled(comm, comm.rank + 100 * turn, 2)
        works = [comm.irecv(boxes[peer], peer) for peer in peers]
        works += [comm.isend(mine, peer) for peer in peers]
        for work in reversed(works) if backwards else works:
            work.wait()
        got.append([[peer, float(boxes[peer][0])] for peer in peers])
    return got


def forgotten_isend(ctx: RankContext) -> list[float]:
    """Nobody keeps the Work, and the sender ends before the receiver asks."""
    comm = ctx.comm
    if comm.rank == 0:
        comm.isend(torch.arange(4.0, device=comm.device), 1)
        return []
    time.sleep(0.1)
    box = zeros(comm, 4)
    comm.recv(box, 0)
    return box.tolist()


def told_of_completion(ctx: RankContext, seconds: float) -> list[bool]:
    """is_completed of a send: not taken yet; taken; waited for."""
    comm, box = ctx.comm, zeros(ctx.comm, 1)
    if comm.rank:
        for tag in (1, 0):
            comm.recv(box, 0, tag)
        comm.send(box, 0, 2)
        return []
    work = comm.isend(filled(comm, 5, 1), 1, 0)
    told = [work.is_completed()]
    comm.send(box, 1, 1)
    comm.recv(box, 1, 2)
    until = comm.time() + seconds
    while not work.is_completed() and comm.time() < until:
        ctx.clock.sleep(0.001)
    told.append(work.is_completed())
    work.wait()
    return [*told, work.is_completed()]


def ring_by_sendrecv(ctx: RankContext) -> list[float]:
    """After n - 1 turns every rank has seen every number; world size 1 too."""
    comm = ctx.comm
    carried = filled(comm, comm.rank, 3)
    seen = []
    for _ in range(comm.world_size):
        seen.append(float(carried[1]))
        received = zeros(comm, 3)
        left, right = comm.rank - 1, comm.rank + 1
        comm.sendrecv(
            carried, right % comm.world_size, received, left % comm.world_size
        )
        carried = received
    return [*seen, float(carried[1])]


def every_dtype_travels(ctx: RankContext) -> list[Tensor]:
    comm, got = ctx.comm, []
    for name in DTYPES:
        dtype = getattr(torch, name)
        sample = torch.tensor([[0, 1, 2], [3, 100, 0]], device=comm.device).to(dtype)
        if comm.rank == 0:
            comm.send(sample, 1)
        else:
            box = zeros(comm, 2, 3, dtype=dtype)
            comm.recv(box, 0)
            got.append(box.cpu())
    return got


def every_dtype_is_broadcast(ctx: RankContext) -> list[Tensor]:
    comm, got = ctx.comm, []
    for name in DTYPES:
        sample = torch.tensor([1, 2, 3], device=comm.device) * (comm.rank + 1)
        tensor = sample.to(getattr(torch, name))
        comm.broadcast(tensor, comm.world_size - 1)
        got.append(tensor.cpu())
    return got


def empty_tensors(ctx: RankContext) -> list[list[int]]:
    """Nothing is a message too: every call takes it and leaves it as it was."""
    comm = ctx.comm
    one, other = zeros(comm, 0, 3), zeros(comm, 0, 3)
    comm.sendrecv(
        one,
        (comm.rank + 1) % comm.world_size,
        other,
        (comm.rank - 1) % comm.world_size,
    )
    comm.broadcast(one, 0)
    comm.all_reduce(one)
    comm.reduce(one, 0)
    comm.all_gather(other, one)
    comm.reduce_scatter(other, one)
    comm.all_to_all(other, one)
    if comm.world_size > 1 and comm.rank < 2:
        if comm.rank == 0:
            comm.send(one, 1)
        else:
            comm.recv(one, 0)
    comm.barrier()
    return [list(one.shape), list(other.shape)]


def a_scalar(ctx: RankContext) -> list[float]:
    """A tensor without dimensions is one element."""
    comm = ctx.comm
    box, out = torch.tensor(float(comm.rank + 1)).to(comm.device), zeros(comm, 1)
    gathered = zeros(comm, comm.world_size)
    comm.all_gather(gathered, box)
    comm.reduce_scatter(out, gathered)
    comm.all_reduce(box)
    return [float(box), float(out[0]), *gathered.tolist()]


# ── what is refused before anything is sent ─────────────────────────────────────────


def refused_everywhere(ctx: RankContext) -> dict[str, str]:
    """Each mistake once; afterwards the communicator still works."""
    comm = ctx.comm
    n, column = comm.world_size, zeros(comm, 4, 4)[:, 1]
    good = zeros(comm, 4)
    answers = {
        "send to self": lambda: comm.send(good, comm.rank),
        "recv from self": lambda: comm.recv(good, comm.rank),
        "isend to self": lambda: comm.isend(good, comm.rank),
        "send too far": lambda: comm.send(good, n),
        "send below": lambda: comm.send(good, -2),
        "recv too far": lambda: comm.recv(good, n + 3),
        "irecv from any": lambda: comm.irecv(good, ANY),
        "sendrecv to nobody": lambda: comm.sendrecv(good, n, zeros(comm, 4), n),
        "broadcast from nobody": lambda: comm.broadcast(good, n),
        "reduce to nobody": lambda: comm.reduce(good, -1),
        "group with nobody": lambda: comm.new_group([0, n]),
        "group of none": lambda: comm.new_group([]),
        "group with twins": lambda: comm.new_group([0, 0]),
        "send column": lambda: comm.send(column, (comm.rank + 1) % n),
        "recv column": lambda: comm.recv(column, ANY),
        "sendrecv column": lambda: comm.sendrecv(column, comm.rank, good, comm.rank),
        "broadcast column": lambda: comm.broadcast(column, 0),
        "all_reduce column": lambda: comm.all_reduce(column),
        "all_gather into column": lambda: comm.all_gather(column, zeros(comm, 1)),
        "not a tensor": lambda: comm.all_reduce([1.0]),  # type: ignore[arg-type]
        "gather size": lambda: comm.all_gather(zeros(comm, 2 * n + 1), zeros(comm, 2)),
        "scatter size": lambda: comm.reduce_scatter(
            zeros(comm, 2), zeros(comm, 2 * n + 1)
        ),
        "all_to_all sizes": lambda: comm.all_to_all(zeros(comm, n), zeros(comm, 2 * n)),
        "send sparse": lambda: comm.send(good.to_sparse(), (comm.rank + 1) % n),
        "all_reduce sparse": lambda: comm.all_reduce(good.to_sparse()),
        "average of ints": lambda: comm.all_reduce(
            zeros(comm, 2, dtype=torch.int64), ReduceOp.AVG
        ),
    }
    texts = {name: refusal(call) for name, call in answers.items()}
    if n > 1:
        uneven = zeros(comm, n + 1)
        texts["all_to_all uneven"] = refusal(lambda: comm.all_to_all(uneven, uneven))
    total = filled(comm, 1, 2)
    comm.all_reduce(total)
    texts["afterwards"] = str(int(total[0]))
    return texts


def sendrecv_with_itself(ctx: RankContext) -> list[Any]:
    comm = ctx.comm
    into, other = zeros(comm, 3), zeros(comm, 3, dtype=torch.int64)
    comm.sendrecv(filled(comm, 5, 3), comm.rank, into, comm.rank)
    return [
        into.tolist(),
        refusal(lambda: comm.sendrecv(zeros(comm, 1), comm.rank, into, comm.rank)),
        refusal(lambda: comm.sendrecv(into, comm.rank, other, comm.rank)),
    ]


# ── collectives ─────────────────────────────────────────────────────────────────────


def barrier_waits(ctx: RankContext) -> list[float]:
    """The last rank comes late; when it came, and when each rank got through."""
    comm = ctx.comm
    if comm.rank == comm.world_size - 1:
        time.sleep(0.15)
    came_s = comm.time()
    comm.barrier()
    return [came_s, comm.time()]


def broadcast_from_each(ctx: RankContext) -> list[list[float]]:
    comm, got = ctx.comm, []
    for src in range(comm.world_size):
        tensor = filled(comm, 100 * comm.rank + src, 2, 2)
        comm.broadcast(tensor, src)
        got.append(tensor.flatten().tolist())
    return got


def contribution(comm: Comm, size: int) -> Tensor:
    """Different on every rank and in every element: 1 + rank, 2 + 2 rank, …"""
    steps = torch.arange(1, size + 1, dtype=torch.float64, device=comm.device)
    return steps * (comm.rank + 1)


def all_reduce_with_each(ctx: RankContext) -> dict[str, list[float]]:
    """Each reduction, blocking and started; first whether there was a Work."""
    comm, got = ctx.comm, {}
    for op in OPS:
        for async_op in (False, True):
            tensor = contribution(comm, 7)
            work = comm.all_reduce(tensor, ReduceOp[op], async_op)
            if work is not None:
                work.wait()
                work.wait()  # once more must change nothing
            got[f"{op} {async_op}"] = [float(work is not None), *tensor.tolist()]
    return got


def conjugates(comm: Comm, *shape: int) -> Tensor:
    """1 - (r + 1)i as a view: the memory has 1 + (r + 1)i."""
    value = complex(1, comm.rank + 1)
    return torch.full(shape, value, device=comm.device).conj()


def what_views_say(ctx: RankContext) -> dict[str, Any]:
    """Each call with a view whose memory isn't what it says; as [real, imaginary]."""
    comm, n = ctx.comm, ctx.comm.world_size
    right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
    got: dict[str, Any] = {}
    for name in ("conj", "neg"):

        def views(size: int, is_neg: bool = name == "neg") -> Tensor:
            negated: Tensor = torch._neg_view(filled(comm, comm.rank + 1, size))
            return negated if is_neg else conjugates(comm, size)

        call = comm.all_reduce
        got[f"{name} all_reduce"] = (mine := views(3))
        call(mine)
        got[f"{name} started"] = (mine := views(3))
        work = call(mine, async_op=True)
        assert work is not None
        work.wait()
        work.wait()
        got[f"{name} broadcast"] = (mine := views(2))
        comm.broadcast(mine, src=n - 1)
        got[f"{name} gathered"] = output = views(n)
        comm.all_gather(output, input=views(1))
        got[f"{name} exchanged"] = output = views(n)
        comm.all_to_all(output, views(n))
        got[f"{name} scattered"] = output = views(1)
        comm.reduce_scatter(output, views(n))
        got[f"{name} sendrecv"] = (mine := views(1))
        comm.sendrecv(views(1), right, mine, left)
        if n > 1:
            got[f"{name} irecv"] = (mine := views(1))
            works = comm.irecv(mine, left), comm.isend(views(1), right)
            for one in works:
                one.wait()
    return {
        name: [[z.real, z.imag] for z in map(complex, tensor.tolist())]
        for name, tensor in got.items()
    }


def half_averages(ctx: RankContext) -> list[float]:
    """Of 40,000 on every rank in float16, where 65,504 is the largest number."""
    comm, avg = ctx.comm, ReduceOp.AVG
    mean, total, started = (filled(comm, 40000.0, 1).half() for _ in range(3))
    comm.all_reduce(mean, avg)
    comm.reduce(total, 0, avg)
    work = comm.all_reduce(started, op=avg, async_op=True)
    assert work is not None
    work.wait()
    chunk = filled(comm, 40000.0, comm.world_size).half()
    part = torch.empty_like(chunk[:1])
    comm.reduce_scatter(part, chunk, avg)
    kept = float(chunk[0])
    own = [float(total)] if comm.rank == 0 else []
    return [float(mean), float(started), float(part), kept, *own]


def reduce_with_each(ctx: RankContext) -> dict[str, list[list[float]]]:
    comm = ctx.comm
    got: dict[str, list[list[float]]] = {op: [] for op in OPS}
    for op in OPS:
        for dst in range(comm.world_size):
            tensor = contribution(comm, 5)
            comm.reduce(tensor, dst, ReduceOp[op])
            got[op].append(tensor.tolist() if dst == comm.rank else [])
    return got


def gather_scatter_exchange(ctx: RankContext) -> dict[str, list[float]]:
    comm, n = ctx.comm, ctx.world_size
    gathered = zeros(comm, n, 2)
    comm.all_gather(gathered, filled(comm, comm.rank + 1, 2))
    summed, averaged = zeros(comm, 3), zeros(comm, 3)
    whole = torch.arange(3.0 * n, device=comm.device) * (comm.rank + 1)
    comm.reduce_scatter(summed, whole)
    comm.reduce_scatter(averaged, whole, ReduceOp.AVG)
    exchanged = zeros(comm, 2 * n)
    numbers = [[10 * comm.rank + dst] * 2 for dst in range(n)]
    comm.all_to_all(exchanged, torch.tensor(numbers).float().to(comm.device))
    return {
        "gathered": gathered.flatten().tolist(),
        "summed": summed.tolist(),
        "averaged": averaged.tolist(),
        "input": whole.tolist(),
        "exchanged": exchanged.tolist(),
    }


def several_at_once(ctx: RankContext) -> list[float]:
    """Five reductions under way, waited for last to first."""
    comm = ctx.comm
    tensors = [filled(comm, number * (comm.rank + 1), 4) for number in range(5)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


# ── groups ──────────────────────────────────────────────────────────────────────────


def evens_and_odds(ctx: RankContext) -> dict[str, Any]:
    """Two disjoint groups that work at the same time; everyone makes both."""
    comm, n = ctx.comm, ctx.world_size
    groups = [comm.new_group(list(range(start, n, 2))) for start in range(min(2, n))]
    mine = groups[comm.rank % 2]
    assert mine is not None
    total = filled(comm, comm.rank, 2)
    mine.all_reduce(total)
    mine.barrier()
    return {
        "is_none": [group is None for group in groups],
        "place": [mine.rank, mine.world_size],
        "total": float(total[0]),
    }


def in_the_given_order(ctx: RankContext) -> list[Any]:
    """A group numbers its ranks as they were listed: here the last is the first."""
    comm = ctx.comm
    turned = comm.new_group(list(reversed(range(comm.world_size))))
    assert turned is not None
    tensor = filled(comm, comm.rank, 1)
    turned.broadcast(tensor, 0)
    return [turned.rank, float(tensor[0])]


def alone_in_a_group(ctx: RankContext) -> list[Any]:
    comm, mine = ctx.comm, None
    for rank in range(comm.world_size):
        group = comm.new_group([rank])
        mine = mine or group
    assert mine is not None
    tensor = filled(comm, comm.rank, 2)
    mine.all_reduce(tensor)
    mine.barrier()
    return [mine.rank, mine.world_size, float(tensor[0])]


def group_of_a_group(ctx: RankContext) -> list[Any]:
    """All but rank 0, and of those all but the first: ranks 2, 3, … as 0, 1, …"""
    comm = ctx.comm
    outer = comm.new_group(list(range(1, comm.world_size)))
    if outer is None:
        return ["outer"]
    inner = outer.new_group(list(range(1, outer.world_size)))
    if inner is None:
        return ["inner"]
    total = filled(comm, comm.rank, 1)
    inner.all_reduce(total)
    return [inner.rank, inner.world_size, float(total[0])]


def groups_that_overlap(ctx: RankContext) -> float:
    """Every rank is in another set of the pairs (0,1) (1,2) …; the rest is None."""
    comm, total = ctx.comm, zeros(ctx.comm, 1)
    for left in range(comm.world_size - 1):
        pair = comm.new_group([left, left + 1])
        if pair is not None:
            mine = filled(comm, comm.rank, 1)
            pair.all_reduce(mine)
            total += mine
    return float(total)


def messages_in_a_group(ctx: RankContext) -> list[Any]:
    """Numbers are the group's: its rank 0 is the world's last, also for ANY."""
    comm = ctx.comm
    turned = comm.new_group(list(reversed(range(comm.world_size))))
    assert turned is not None
    if turned.rank:
        turned.send(filled(comm, comm.rank, 1), 0)
        return []
    got = []
    for _ in range(turned.world_size - 1):
        box = zeros(comm, 1)
        src = turned.recv(box, ANY)
        got.append([src, float(box[0])])
    return sorted(got)


def group_and_world_do_not_mix(ctx: RankContext) -> list[float]:
    """The same pair, the same tag, two groups: each receive gets its own group's."""
    comm = ctx.comm
    pair = comm.new_group([0, 1])
    assert pair is not None
    if comm.rank == 0:
        works = [comm.isend(filled(comm, 1, 1), 1), pair.isend(filled(comm, 2, 1), 1)]
        for work in works:
            work.wait()
        return []
    of_pair, of_world = zeros(comm, 1), zeros(comm, 1)
    pair.recv(of_pair, 0)
    comm.recv(of_world, 0)
    return [float(of_pair), float(of_world)]


def group_outlives_its_name(ctx: RankContext) -> float:
    """Rank 0 drops its group and ends while the others still receive through it."""
    comm = ctx.comm
    box = zeros(comm, 50_000)

    def use() -> None:
        group = comm.new_group(list(range(comm.world_size)))
        assert group is not None
        group.broadcast(box if comm.rank else box + 3, 0)

    use()
    return float(box[-1])


# ── lost peers and time ─────────────────────────────────────────────────────────────


def nobody_sends(ctx: RankContext, how: str) -> dict[str, Any] | None:
    comm = ctx.comm
    box = zeros(comm, 2)
    comm.barrier()  # all are connected: without it rank 0 may leave before that
    if how == "soon":  # and before rank 1 has read that rank 0 is in the barrier
        if comm.rank == 0:
            ctx.store.wait(["through"], timeout_s=10.0)
        else:
            ctx.store.set("through", b"")
    waits: dict[str, Callable[[], object]] = {
        "recv": lambda: comm.recv(box, 1, timeout_s=0.15),
        "any": lambda: comm.recv(box, ANY, timeout_s=0.15),
        "irecv": lambda: comm.irecv(box, 1).wait(0.15),
        "send": lambda: comm.send(box, 1, timeout_s=0.15),
        "isend": lambda: comm.isend(box, 1).wait(0.15),
        "sendrecv": lambda: comm.sendrecv(box, 1, zeros(comm, 2), 1, timeout_s=0.15),
        "barrier": lambda: comm.barrier(timeout_s=0.15),
        "all_reduce": lambda: comm.all_reduce(box, timeout_s=0.15),
        "soon": lambda: comm.recv(box, 1, timeout_s=0.0),
    }
    return loss(waits[how]) if comm.rank == 0 else None


def a_peer_dies(ctx: RankContext, how: str) -> None:
    """Rank 1 ends its process while rank 0 waits; rank 0 tells what it was told."""
    comm = ctx.comm
    box = zeros(comm, 2)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.05)
        os._exit(7)
    if comm.rank == 0:
        waits: dict[str, Callable[[], object]] = {
            "recv": lambda: comm.recv(box, 1),
            "send": lambda: comm.send(box, 1),
            "barrier": comm.barrier,
            "all_reduce": lambda: comm.all_reduce(box),
            "irecv": lambda: comm.irecv(box, 1).wait(),
        }
        ctx.report(loss(waits[how]))
        ctx.report(loss(waits[how]))  # gone it stays
        time.sleep(5)  # until the run is over


def rank_zero_aborts(ctx: RankContext) -> None:
    comm = ctx.comm
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.05)
        comm.abort()
        comm.abort()
        ctx.report({"rank": 0, "peer": 1})
    else:
        ctx.report(loss(lambda: comm.recv(zeros(comm, 1), 0)))


def both_send_first(ctx: RankContext, size: int) -> None:
    comm = ctx.comm
    comm.send(zeros(comm, size), 1 - comm.rank)
    comm.recv(zeros(comm, size), 1 - comm.rank)


def clock(ctx: RankContext) -> list[float]:
    comm = ctx.comm
    readings = [comm.time()]
    for _ in range(200):
        comm.barrier()
        readings.append(comm.time())
    return readings
