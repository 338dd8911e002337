"""What the hooks of unit gradient_compression have in common, and three simple ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from distlab.comm import Comm, Work


class Bucket(Protocol):
    """What a hook gets: `flat` has the gradients of `parameters`, one after another."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Their order is that of the gradients in `flat`."""

    @property
    def flat(self) -> Tensor:
        """One dimension; the sum over the ranks goes into it, in place."""


class FlatBucket:
    """A Bucket that is not DDP's: `flat` is written into, and never replaced."""

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        self.parameters = parameters
        self._flat = flat

    @property
    def flat(self) -> Tensor:
        """See `Bucket.flat`."""
        return self._flat

    @flat.setter
    def flat(self, value: Tensor) -> None:
        if value is not self._flat:  # `bucket.flat += t` assigns the same tensor
            raise ValueError(
                "bucket.flat was replaced by another tensor: write into it"
            )


class Later:
    """A Work: its wait() waits for `works` and then calls `then`, once."""

    def __init__(self, works: Sequence[Work | None], then: Callable[[], None]) -> None:
        self._works, self._then = works, then
        self._is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        if self._is_done:
            return
        for work in self._works:
            if work is not None:
                work.wait(timeout_s)
        self._then()
        self._is_done = True

    def is_completed(self) -> bool:
        """See `Work.is_completed`: False until wait() is over, for `then` may wait."""
        return self._is_done


class Residuals:
    """What a rank has not sent yet, for each parameter.

    It is kept by parameter: torch's DDP puts parameters into other buckets after its
    first step. We don't keep inf and nan. They are normal under loss scaling, and would
    come back in every later step.
    """

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, Tensor] = {}

    def of(self, bucket: Bucket) -> Tensor:
        """Like bucket.flat, in a tensor of its own; zeros at first."""
        parts = [
            self._by_parameter.get(p, bucket.flat.new_zeros(p.numel()))
            for p in bucket.parameters
        ]
        return torch.cat(parts)

    def keep(self, bucket: Bucket, rest: Tensor) -> None:
        """Let `of` return `rest` from now on, as in bucket.flat; inf and nan are 0."""
        like_flat = rest.detach().to(bucket.flat, copy=True)
        like_flat.nan_to_num_(0.0, 0.0, 0.0)
        parts = like_flat.split([p.numel() for p in bucket.parameters])
        self._by_parameter.update(zip(bucket.parameters, parts, strict=True))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """What was kept, by the names of the model's parameters."""
        return _by_name(model, self._by_parameter)

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """From now on `state` is what was kept."""
        self._by_parameter = _by_parameter(model, state)


class Factors:
    """The second factor of each matrix, as it was after the last step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._by_parameter: dict[Tensor, Tensor] = {}

    def of(self, bucket: Bucket) -> list[Tensor]:
        """(columns, r) for each matrix; at first random, the same on every rank."""
        found = []
        for p, matrix in zip(_matrices_in(bucket), split(bucket)[0], strict=True):
            first = first_factor(matrix, self._rank)
            found.append(self._by_parameter.get(p, first))
        return found

    def keep(self, bucket: Bucket, factors: Sequence[Tensor]) -> None:
        """Let `of` return these from now on, except for those with inf or nan."""
        for p, factor in zip(_matrices_in(bucket), factors, strict=True):
            if factor.isfinite().all():  # the same on all ranks: it is a sum
                self._by_parameter[p] = factor.clone()

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The factors, by the names of the model's parameters."""
        return _by_name(model, self._by_parameter)

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """From now on these are the factors."""
        self._by_parameter = _by_parameter(model, state)


class ChunkResiduals(Residuals):
    """A rank's residuals, and what it kept of the sums of its chunk of each bucket.

    Another number of ranks has other chunks, for which nothing is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_sums: dict[Tensor, tuple[int, Tensor]] = {}

    def of_sums(self, bucket: Bucket, like: Tensor, n: int) -> Tensor:
        """Like `like`, this rank's chunk on n ranks; zeros at first."""
        size, kept = self._of_sums.get(bucket.parameters[0], (0, like))
        is_the_same = size == n and len(kept) == len(like)
        return kept if is_the_same else torch.zeros_like(like)

    def keep_sums(self, bucket: Bucket, rest: Tensor, n: int) -> None:
        """From now on `of_sums` returns `rest`; 0 for inf and nan."""
        self._of_sums[bucket.parameters[0]] = n, rest.nan_to_num(0.0, 0.0, 0.0)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Both, by the names of the model's parameters."""
        sums = {
            f"{name}{_SUMS}{self._of_sums[p][0]}": self._of_sums[p][1]
            for name, p in model.named_parameters()
            if p in self._of_sums
        }
        return {**super().state_dict(model), **sums}

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """From now on `state` is what was kept."""
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
    """Matrices (rows, columns), views; and the elements of all other parameters.

    They are taken from `flat`, which is like bucket.flat. A parameter of two or more
    dimensions is a matrix, unless it is empty: the first one has the rows.
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
    """The reverse of `split`: a tensor like bucket.flat."""
    rows = iter(matrices)
    sizes = [p.numel() for p in bucket.parameters if not _is_matrix(p)]
    rest = iter(others.split(sizes))
    parts = [next(rows if _is_matrix(p) else rest) for p in bucket.parameters]
    return torch.cat([part.reshape(-1) for part in parts])


def first_factor(matrix: Tensor, rank: int) -> Tensor:
    """Random numbers of a fixed seed: (columns, r), r no larger than the matrix."""
    shape = matrix.shape[1], min(rank, *matrix.shape)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(matrix)


def _matrices_in(bucket: Bucket) -> list[Tensor]:
    return [p for p in bucket.parameters if _is_matrix(p)]


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.numel() > 0


def fp16(comm: Comm, bucket: Bucket) -> Work:
    """Average in float16: half of the bytes; a gradient above 65,504 becomes inf.

    We divide by n before the sum, because the sum may overflow even if the mean fits.
    """
    return _cast(comm, bucket, torch.float16)


def bf16(comm: Comm, bucket: Bucket) -> Work:
    """Sum in bfloat16: half of the bytes, the range of float32, 8 bits of digits."""
    return _cast(comm, bucket, torch.bfloat16)


def _cast(comm: Comm, bucket: Bucket, dtype: torch.dtype) -> Work:
    n = comm.world_size
    small = (bucket.flat / n).to(dtype)
    work = comm.all_reduce(small, async_op=True)

    def finish() -> None:
        bucket.flat.copy_(small).mul_(n)

    return Later([work], finish)


class Sign:
    """One bit per gradient: its sign, and one magnitude for each chunk.

    Every rank sends chunk r to rank r, which adds the chunks, reduces the sum to signs
    again, and sends it to all. Both times what is lost is kept for the next step.

    Source: F. Seide et al., 1-Bit SGD (Interspeech 2014); H. Tang et al., 1-bit Adam
    (arXiv 2102.02888), figure 3, for the two passes.
    Cost: 2(n-1)/n · N/8 bytes and n magnitudes for N gradients, twice.
    """

    def __init__(self) -> None:
        self.residuals = ChunkResiduals()  # of this rank

    def __call__(self, comm: Comm, bucket: Bucket) -> Work:
        """A comm_hook: start the first pass; wait() does the second."""
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
    """The signs of rows of 8·b numbers as rows of b bytes: a bit is set where x ≥ 0."""
    is_set = (rows >= 0).view(len(rows), -1, 8).to(torch.uint8)
    return (is_set << torch.arange(8, device=rows.device)).sum(2, dtype=torch.uint8)


def from_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse: 1 for a bit that is set, else -1."""
    bits = (rows[:, :, None] >> torch.arange(8, device=rows.device)) & 1
    return bits.view(len(rows), -1).to(dtype) * 2 - 1


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return torch.cat([values, values.new_zeros(missing)])
