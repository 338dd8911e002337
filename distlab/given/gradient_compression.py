"""Shared parts of the hooks in unit gradient_compression, and three simple hooks.

`torch_hook` makes a hook of this unit usable with torch's DistributedDataParallel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distlab.comm import Comm, TorchComm, Work


class Bucket(Protocol):
    """The bucket that a hook gets: `flat` holds the gradients of `parameters`."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The bucket's parameters, in the order of their gradients in `flat`."""

    @property
    def flat(self) -> Tensor:
        """The gradients in one dimension; a hook writes the ranks' sum into it."""


class FlatBucket:
    """A Bucket outside of DDP, whose `flat` you write into but never replace."""

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        self.parameters = parameters
        self._flat = flat

    @property
    def flat(self) -> Tensor:
        """The gradients in one dimension, as in `Bucket.flat`."""
        return self._flat

    @flat.setter
    def flat(self, value: Tensor) -> None:
        if value is not self._flat:  # `bucket.flat += t` assigns the same tensor
            raise ValueError(
                "bucket.flat was replaced by another tensor; write into the existing "
                "one"
            )


class Later:
    """A Work whose wait() waits for `works` and then calls `then` once."""

    def __init__(self, works: Sequence[Work | None], then: Callable[[], None]) -> None:
        self._works, self._then = works, then
        self._is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for `works`, then call `then`, unless an earlier call did so."""
        if self._is_done:
            return
        for work in self._works:
            if work is not None:
                work.wait(timeout_s)
        self._then()
        self._is_done = True

    def is_completed(self) -> bool:
        """Return False until wait() has returned, because `then` may have to wait."""
        return self._is_done


class Residuals:
    """The part of each parameter's gradient that this rank hasn't sent yet.

    We store it per parameter, because torch's DDP moves parameters to other buckets
    after its first step. We don't keep inf and nan: they are normal under loss scaling,
    but they would come back in every later step.
    """

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, Tensor] = {}

    def of(self, bucket: Bucket) -> Tensor:
        """Return the residual as a new tensor like bucket.flat; zeros at first."""
        parts = [
            self._by_parameter.get(p, bucket.flat.new_zeros(p.numel()))
            for p in bucket.parameters
        ]
        return torch.cat(parts)

    def keep(self, bucket: Bucket, rest: Tensor) -> None:
        """Store `rest`, a tensor like bucket.flat, for `of`; inf and nan become 0."""
        like_flat = rest.detach().to(bucket.flat, copy=True)
        like_flat.nan_to_num_(0.0, 0.0, 0.0)
        parts = like_flat.split([p.numel() for p in bucket.parameters])
        self._by_parameter.update(zip(bucket.parameters, parts, strict=True))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the residuals under the names of the model's parameters."""
        return _by_name(model, self._by_parameter)

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Replace the residuals by those in `state`."""
        self._by_parameter = _by_parameter(model, state)


class Factors:
    """The second factor of each matrix, as it was after the last step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._by_parameter: dict[Tensor, Tensor] = {}

    def of(self, bucket: Bucket) -> list[Tensor]:
        """Return a (columns, r) factor for each matrix, in the order of `split`.

        At first the factors are random, but the same on every rank.
        """
        found = []
        for p, matrix in zip(_matrices_in(bucket), split(bucket)[0], strict=True):
            first = first_factor(matrix, self._rank)
            found.append(self._by_parameter.get(p, first))
        return found

    def keep(self, bucket: Bucket, factors: Sequence[Tensor]) -> None:
        """Store these factors for `of`, except for those that contain inf or nan."""
        for p, factor in zip(_matrices_in(bucket), factors, strict=True):
            if factor.isfinite().all():  # the same on all ranks: it is a sum
                self._by_parameter[p] = factor.clone()

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the factors under the names of the model's parameters."""
        return _by_name(model, self._by_parameter)

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Replace the factors by those in `state`."""
        self._by_parameter = _by_parameter(model, state)


class ChunkResiduals(Residuals):
    """A rank's residuals, and those of the sums that it computed for its own chunks.

    If the number of ranks changes, the chunks change as well. The residuals of the sums
    then start again at zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_sums: dict[Tensor, tuple[int, Tensor]] = {}

    def of_sums(self, bucket: Bucket, like: Tensor, n: int) -> Tensor:
        """Return the residual of this rank's summed chunk on n ranks; zeros at first.

        It has the shape of `like`.
        """
        size, kept = self._of_sums.get(bucket.parameters[0], (0, like))
        is_the_same = size == n and len(kept) == len(like)
        return kept if is_the_same else torch.zeros_like(like)

    def keep_sums(self, bucket: Bucket, rest: Tensor, n: int) -> None:
        """Store `rest` for `of_sums`; inf and nan become 0."""
        self._of_sums[bucket.parameters[0]] = n, rest.nan_to_num(0.0, 0.0, 0.0)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return both kinds of residuals under the names of the model's parameters."""
        sums = {
            f"{name}{_SUMS}{self._of_sums[p][0]}": self._of_sums[p][1]
            for name, p in model.named_parameters()
            if p in self._of_sums
        }
        return {**super().state_dict(model), **sums}

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Replace both kinds of residuals by those in `state`."""
        plain = {name: kept for name, kept in state.items() if _SUMS not in name}
        super().load_state_dict(model, plain)
        named, self._of_sums = dict(model.named_parameters()), {}
        for key, kept in state.items():
            name, is_sum, size = key.rpartition(_SUMS)
            if is_sum:
                own = kept.to(named[name].device).clone()
                self._of_sums[named[name]] = int(size), own


_SUMS = ":sums of chunks on "


def _by_name(model: nn.Module, kept: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    return {name: kept[p] for name, p in model.named_parameters() if p in kept}


def _by_parameter(
    model: nn.Module, state: Mapping[str, Tensor]
) -> dict[Tensor, Tensor]:
    named = dict(model.named_parameters())
    return {named[name]: t.to(named[name].device).clone() for name, t in state.items()}


def split(bucket: Bucket, flat: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """Return the matrices in a bucket as views, and all other elements in one tensor.

    They are taken from `flat`, which is laid out like bucket.flat. Each parameter with
    two or more dimensions is a matrix of shape (rows, columns), unless it is empty; its
    first dimension becomes the rows.
    """
    flat = bucket.flat if flat is None else flat
    matrices, others = [], []
    parts = flat.split([p.numel() for p in bucket.parameters])
    for p, part in zip(bucket.parameters, parts, strict=True):
        if _is_matrix(p):
            matrices.append(part.view(len(p), -1))
        else:
            others.append(part)
    return matrices, torch.cat([flat[:0], *others])


def join(bucket: Bucket, matrices: Sequence[Tensor], others: Tensor) -> Tensor:
    """Undo `split`: return a tensor that is laid out like bucket.flat."""
    rows = iter(matrices)
    sizes = [p.numel() for p in bucket.parameters if not _is_matrix(p)]
    rest = iter(others.split(sizes))
    parts = [next(rows if _is_matrix(p) else rest) for p in bucket.parameters]
    return torch.cat([part.reshape(-1) for part in parts])


def first_factor(matrix: Tensor, rank: int) -> Tensor:
    """Return random numbers with a fixed seed, of shape (columns, r).

    r is at most the smaller side of the matrix.
    """
    shape = matrix.shape[1], min(rank, *matrix.shape)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(matrix)


def _matrices_in(bucket: Bucket) -> list[Tensor]:
    return [p for p in bucket.parameters if _is_matrix(p)]


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.numel() > 0


def fp16(comm: Comm, bucket: Bucket) -> Work:
    """Average in float16, which halves the bytes; a gradient above 65,504 becomes inf.

    We divide by n before the sum, because the sum may overflow even if the mean fits.
    """
    return _cast(comm, bucket, torch.float16)


def bf16(comm: Comm, bucket: Bucket) -> Work:
    """Sum in bfloat16: half the bytes, the range of float32, 8 significant bits."""
    return _cast(comm, bucket, torch.bfloat16)


def _cast(comm: Comm, bucket: Bucket, dtype: torch.dtype) -> Work:
    n = comm.world_size
    small = (bucket.flat / n).to(dtype)
    work = comm.all_reduce(small, async_op=True)

    def finish() -> None:
        bucket.flat.copy_(small).mul_(n)

    return Later([work], finish)


class Sign:
    """Send one bit per gradient, its sign, and one magnitude for each chunk.

    Every rank sends chunk r to rank r, which adds the chunks, reduces the sum to signs
    again and sends it to all ranks. In both passes, the error is kept for the next
    step.

    Source: F. Seide et al., 1-Bit SGD (Interspeech 2014); H. Tang et al., 1-bit Adam
    (arXiv 2102.02888), figure 3, for the two passes.
    Cost: 2(n-1)/n · N/8 bytes and n magnitudes for N gradients, twice.
    """

    def __init__(self) -> None:
        self.residuals = ChunkResiduals()  # of this rank

    def __call__(self, comm: Comm, bucket: Bucket) -> Work:
        """Start the first pass, as a comm_hook; wait() does the second."""
        n, flat = comm.world_size, bucket.flat
        corrected = flat + self.residuals.of(bucket)
        chunks = _padded(corrected, 8 * n).view(n, -1)  # (n, elements of a chunk)
        scales = chunks.abs().mean(1, keepdim=True)
        sent = (_signs(chunks) * scales).view(-1)[: len(flat)]
        self.residuals.keep(bucket, corrected - sent)
        bits, own = to_bits(chunks), torch.empty_like(scales)
        got = torch.empty_like(bits)
        works = [
            comm.all_to_all(got, bits, async_op=True),
            comm.all_to_all(own, scales, async_op=True),
        ]

        def finish() -> None:
            total = (from_bits(got, flat.dtype) * own).sum(0)
            total += self.residuals.of_sums(bucket, total, n)
            scale = total.abs().mean().view(1)
            self.residuals.keep_sums(bucket, total - _signs(total) * scale, n)
            all_bits, all_scales = torch.empty_like(bits), torch.empty_like(own)
            comm.all_gather(all_bits, to_bits(total[None]))
            comm.all_gather(all_scales, scale)
            sums = from_bits(all_bits, flat.dtype) * all_scales
            flat.copy_(sums.view(-1)[: len(flat)])

        return Later(works, finish)


def to_bits(rows: Tensor) -> Tensor:
    """Pack the signs of rows of 8·b numbers into rows of b bytes; x ≥ 0 sets a bit."""
    is_set = (rows >= 0).view(len(rows), -1, 8).to(torch.uint8)
    return (is_set << torch.arange(8, device=rows.device)).sum(2, dtype=torch.uint8)


def from_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo to_bits: return 1 for each bit that is set, and -1 for each that isn't."""
    bits = (rows[:, :, None] >> torch.arange(8, device=rows.device)) & 1
    return bits.view(len(rows), -1).to(dtype) * 2 - 1


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return torch.cat([values, values.new_zeros(missing)])


# ── hooks with torch's DistributedDataParallel ────────────────────────────────────────

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
