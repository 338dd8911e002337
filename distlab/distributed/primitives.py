"""Messages and collectives on the default group; each returns its result.

Every collective calls a task's function, either yours or the reference's: see
`parts.TABLE`. Tensors must be on the group's device but needn't be contiguous, so you
can pass transposed, conjugate and negative views. With `comm`, you can use another
group than the default one. We sum averages of float16 in float32, although this doubles
the bytes, because a sum above 65,504 is inf even if the mean is finite. The names come
from torch.distributed and MPI.

If the ranks make different calls, or pass different shapes or dtypes, they all raise
DisagreementError, a ValueError that shows both calls and their lines. To find this out,
each collective first compares 16 bytes from every rank, and each message is preceded by
a header. That is why `send` needs this module's `recv` on the other side. For a few
bytes, the comparison takes as long as the collective itself. You can turn it off by
setting DISTLAB_COMPARE=0 on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from numbers import Integral

import torch
from torch import Tensor

from distlab.comm import ANY, Comm, ReduceOp
from distlab.distributed.calls import (
    kind_of,
    require_header,
    require_sendable,
    same_call,
    send_header,
)
from distlab.distributed.group import default_comm
from distlab.distributed.parts import running, unit
from distlab.distributed.pool import staging

_COMBINE: dict[ReduceOp, Callable[[Tensor], Tensor]] = {  # (n, elements) → (elements)
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.AVG: lambda rows: rows.sum(0) / len(rows),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


def send(tensor: Tensor, dst: int, tag: int = 0, comm: Comm | None = None) -> Tensor:
    """Send `tensor` to rank `dst`, and return it once `dst` has called recv.

    Example:
        init_process_group()
        if get_world_size() > 1 and get_rank() == 0:
            send(torch.tensor([5.0]), dst=1)
        if get_rank() == 1:
            assert recv(torch.zeros(1), src=0).item() == 5
    """
    comm, values = comm or default_comm(), _values(tensor)
    send_header(comm, values, dst, tag)
    comm.send(values, dst, tag)
    return tensor


def recv(
    tensor: Tensor, src: int = ANY, tag: int = 0, comm: Comm | None = None
) -> Tensor:
    """Receive into `tensor` from rank `src`, or from any rank, and return it.

    Raises:
        ValueError: the message has a different number of elements or a different dtype.

    Example:
        init_process_group()
        if get_rank() == 0:
            for _ in range(get_world_size() - 1):
                assert recv(torch.zeros(2)).sum() > 0  # from any rank
        else:
            send(torch.full((2,), float(get_rank())), dst=0)
    """
    comm, values = comm or default_comm(), _values(tensor, is_written=True)
    source = require_header(comm, values, src, tag)
    comm.recv(values, source, tag)
    return _written(tensor, values)


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm | None = None
) -> Tensor:
    """Reduce `tensor` over all ranks, in place on every rank, and return it.

    SUM and AVG use unit ring_allreduce. MIN, MAX and PRODUCT instead gather all ranks'
    tensors and combine them in rank order, which sends n times the bytes.

    Raises:
        ValueError: `op` is AVG and the tensor has integers.

    Example:
        init_process_group()
        total = all_reduce(torch.tensor([1, 2]))
        assert total.tolist() == [get_world_size(), 2 * get_world_size()]
    """
    comm = comm or default_comm()
    same_call(
        comm,
        lambda: f"all_reduce({_reducible(_values(tensor, is_written=True), op)})",
    )
    return _all_reduce(tensor, op, comm)


def _all_reduce(tensor: Tensor, op: ReduceOp, comm: Comm) -> Tensor:
    own = _values(tensor, is_written=True)
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        values = _summable(own, op)
        with running():
            unit("ring_allreduce").all_reduce(comm, values, average=op is ReduceOp.AVG)
        return _written(tensor, values)
    values = own.view(-1)
    with staging(comm.world_size * values.numel(), values) as gathered:
        _gather_into(gathered, values, comm)
        rows = gathered.view(comm.world_size, -1)
        return _written(tensor, _COMBINE[op](rows).to(tensor.dtype))


def broadcast(tensor: Tensor, src: int = 0, comm: Comm | None = None) -> Tensor:
    """Copy rank `src`'s `tensor` to every rank, in place, and return it.

    Example:
        init_process_group()
        mine = torch.tensor([10.0 + get_rank()])
        assert broadcast(mine, src=get_world_size() - 1) == 9 + get_world_size()
    """
    comm = comm or default_comm()

    def call() -> str:
        _values(tensor, is_written=True)
        return f"broadcast({kind_of(tensor)}, src={_require_rank(src, comm)})"

    same_call(comm, call)
    values = _values(tensor, is_written=True)
    with running():
        unit("collectives").broadcast(comm, values, src)
    return _written(tensor, values)


def reduce(
    tensor: Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, comm: Comm | None = None
) -> Tensor:
    """Reduce `tensor` over all ranks, in place on rank `dst` only, and return it.

    Example:
        init_process_group()
        total = reduce(torch.ones(3), dst=0)
        assert total.sum() == 3 * (get_world_size() if get_rank() == 0 else 1)
    """
    comm = comm or default_comm()

    def call() -> str:
        _require_rank(dst, comm)
        _values(tensor, is_written=comm.rank == dst)
        return f"reduce({_reducible(tensor, op)}, dst={dst})"

    same_call(comm, call)
    if comm.rank == dst:
        return _all_reduce(tensor, op, comm)
    with staging(tensor.numel(), tensor) as values:
        values.copy_(_values(tensor).view(-1))
        _all_reduce(values, op, comm)
    return tensor


def all_gather(tensor: Tensor, comm: Comm | None = None) -> list[Tensor]:
    """Return every rank's `tensor` in rank order; all must have the same shape.

    Example:
        init_process_group()
        ranks = all_gather(torch.tensor(get_rank()))
        assert [int(rank) for rank in ranks] == list(range(get_world_size()))
    """
    comm = comm or default_comm()
    same_call(comm, lambda: f"all_gather({kind_of(tensor)})")
    return _all_gather(tensor, comm)


def _all_gather(tensor: Tensor, comm: Comm) -> list[Tensor]:
    values = _values(tensor).view(-1)
    output = values.new_empty(comm.world_size * values.numel())
    _gather_into(output, values, comm)
    return list(output.view(comm.world_size, *tensor.shape).unbind())


def gather(
    tensor: Tensor, dst: int = 0, comm: Comm | None = None
) -> list[Tensor] | None:
    """Return every rank's `tensor` in rank order on rank `dst`, and None on the others.

    Because it uses the task of all_gather, it costs as much as that.

    Example:
        init_process_group()
        rows = gather(torch.full((2,), get_rank()), dst=0)
        assert (rows is None) == (get_rank() != 0)
    """
    comm = comm or default_comm()
    same_call(
        comm, lambda: f"gather({kind_of(tensor)}, dst={_require_rank(dst, comm)})"
    )
    tensors = _all_gather(tensor, comm)
    return tensors if comm.rank == dst else None


def reduce_scatter(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm | None = None
) -> Tensor:
    """Reduce over all ranks, and return this rank's chunk along the first dimension.

    Raises:
        ValueError: n doesn't divide the first dimension, or `op` is AVG and the tensor
            has integers.

    Example:
        init_process_group()
        n = get_world_size()
        mine = reduce_scatter(torch.arange(2 * n))  # two elements for each rank
        assert mine.tolist() == [2 * get_rank() * n, (2 * get_rank() + 1) * n]
    """
    comm = comm or default_comm()
    same_call(
        comm, lambda: f"reduce_scatter({_reducible(_with_chunks(tensor, comm), op)})"
    )
    values, shape = _chunked(tensor, comm)
    output = values.new_empty(values.numel() // comm.world_size)
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        sums, parts = _summable(output, op), _summable(values, op)
        with running():
            unit("collectives").reduce_scatter(comm, sums, parts)
        output.copy_(sums / comm.world_size if op is ReduceOp.AVG else sums)
    else:
        with staging(values.numel(), values) as received:
            with running():
                unit("collectives").all_to_all(comm, received, values)
            rows = received.view(comm.world_size, -1)
            output.copy_(_COMBINE[op](rows))
    return output.view(shape)


def scatter(
    tensor: Tensor,
    tensors: Sequence[Tensor] | None = None,
    src: int = 0,
    comm: Comm | None = None,
) -> Tensor:
    """Fill `tensor` with this rank's element of rank `src`'s list, and return it.

    Only rank `src` reads `tensors`, which must have a tensor for each rank, all with
    the shape and dtype of `tensor`. Because it uses the task of all_to_all, it costs as
    much as that.

    Raises:
        ValueError: rank `src` doesn't pass a list of n tensors.

    Example:
        init_process_group()
        rows = [torch.tensor([r, 10 * r]) for r in range(get_world_size())]
        mine = scatter(torch.zeros(2, dtype=torch.int64), rows, src=0)
        assert mine.tolist() == [get_rank(), 10 * get_rank()]
    """
    comm = comm or default_comm()
    n = comm.world_size

    def call() -> str:
        _require_rank(src, comm)
        _values(tensor, is_written=True)
        kinds = [kind_of(t) for t in tensors or ()]
        if comm.rank == src and kinds != [kind_of(tensor)] * n:
            raise ValueError(f"rank {src} scatters {n} tensors of {kind_of(tensor)}")
        return f"scatter({kind_of(tensor)}, src={src})"

    same_call(comm, call)
    size = tensor.numel()
    with staging(2 * n * size, tensor) as buffer:
        outgoing, incoming = buffer.tensor_split(2)
        if comm.rank == src:
            assert tensors is not None
            torch.cat([_values(t).view(-1) for t in tensors], out=outgoing)
        else:
            outgoing.zero_()
        with running():
            unit("collectives").all_to_all(comm, incoming, outgoing)
        return _written(tensor, incoming.view(n, size)[src])


def all_to_all(tensor: Tensor, comm: Comm | None = None) -> Tensor:
    """Send chunk p of `tensor` to rank p; return the chunks that this rank received.

    The chunks are slices along the first dimension. Chunk p of the result comes from
    rank p.

    Raises:
        ValueError: n doesn't divide the first dimension.

    Example:
        init_process_group()
        n = get_world_size()
        received = all_to_all(torch.arange(n) + 10 * get_rank())
        assert received.tolist() == [10 * p + get_rank() for p in range(n)]
    """
    comm = comm or default_comm()
    same_call(comm, lambda: f"all_to_all({kind_of(_with_chunks(tensor, comm))})")
    values, _ = _chunked(tensor, comm)
    output = torch.empty_like(values)
    with running():
        unit("collectives").all_to_all(comm, output, values)
    return output.view(tensor.shape)


def barrier(comm: Comm | None = None) -> None:
    """Wait until every rank has called it.

    Example:
        init_process_group()
        barrier()
    """
    comm = comm or default_comm()
    same_call(comm, lambda: "barrier()")
    with running():
        unit("collectives").all_reduce(comm, torch.ones(1, device=comm.device))


def _values(tensor: Tensor, is_written: bool = False) -> Tensor:
    """Return the tensor's values in contiguous memory, without a copy if possible."""
    require_sendable(tensor)
    if is_written and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "a tensor made in inference_mode() can't be written outside of it: give "
            "a clone() of it"
        )
    places = zip(tensor.shape, tensor.stride(), strict=True) if is_written else ()
    if any(size > 1 and not stride for size, stride in places):
        raise ValueError(
            f"several elements of a tensor of shape {tuple(tensor.shape)} share the "
            "same memory, as after expand(): pass a clone() to write into"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _summable(values: Tensor, op: ReduceOp) -> Tensor:
    """Convert to a dtype in which the sum doesn't overflow if the mean fits."""
    is_narrow = op is ReduceOp.AVG and values.dtype is torch.float16
    return values.float() if is_narrow else values


def _gather_into(output: Tensor, values: Tensor, comm: Comm) -> None:
    with running():
        unit("collectives").all_gather(comm, output, values)


def _chunked(tensor: Tensor, comm: Comm) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor's elements in a row, and the shape of one of its n chunks."""
    require_sendable(tensor)
    n, shape = comm.world_size, tensor.shape
    if not shape or shape[0] % n:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has no {n} equal chunks along its "
            "first dimension"
        )
    return _values(tensor).view(-1), (shape[0] // n, *shape[1:])


def _with_chunks(tensor: Tensor, comm: Comm) -> Tensor:
    _chunked(tensor, comm)
    return tensor


def _written(tensor: Tensor, values: Tensor) -> Tensor:
    """Write `values` into `tensor` and return it."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.shape))
    return tensor


def _reducible(tensor: Tensor, op: ReduceOp) -> str:
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op is {op!r}: take one of distlab.distributed.ReduceOp")
    require_sendable(tensor)
    if op is ReduceOp.AVG and not tensor.is_floating_point():
        raise ValueError(f"{tensor.dtype} has no mean: use SUM and divide")
    if not _can_combine(tensor.dtype, op):
        raise ValueError(f"torch has no {op.name} of {tensor.dtype}: convert it first")
    return f"{kind_of(tensor)}, {op.name}"


@cache
def _can_combine(dtype: torch.dtype, op: ReduceOp) -> bool:
    rows = torch.zeros(2, 1, dtype=dtype)
    try:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            rows[0].add_(rows[1])  # as the rings do
        else:
            _COMBINE[op](rows)
    except RuntimeError:  # a NotImplementedError is one
        return False
    return True


def _require_rank(rank: int, comm: Comm) -> int:
    if not isinstance(rank, Integral):
        raise ValueError(f"{rank!r} is no rank: give a whole number")
    if not 0 <= rank < comm.world_size:
        last = comm.world_size - 1
        raise ValueError(f"there is no rank {rank}: ranks are 0 … {last}")
    return rank
