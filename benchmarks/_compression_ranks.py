"""What each rank does for `benchmarks/compression.py`.

All train the convnet of `distlab/models`; its images have 28×28 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import ByteMeter, Comm, Traffic, Work
from distlab.curriculum import load
from distlab.data.digits import load_digits_split
from distlab.data.idx_sets import SIDE, Images, known_sets, read_images
from distlab.given import gradient_compression as given
from distlab.given.gradient_compression import torch_hook
from distlab.models.convnet import make_convnet
from distlab.runner import RankContext
from tests.corpora.both_ways import leave, meet

UNIT = "gradient_compression"
RATIO, FACTORS = 0.01, 4
BUCKET_MIB = 0.25  # the convnet has three buckets, one of them a single weight
BATCH = 32  # on all ranks together
LEARNING_RATE = 0.05
BYTE_STEPS = 3
DENSE_STEPS, POWER_STEPS = 2, 4  # torch's PowerSGD begins with two dense steps

Hook = Callable[[Comm, Any], Work]


def dense(comm: Comm, bucket: Any) -> Any:
    """No compression."""
    return comm.all_reduce(bucket.flat, async_op=True)


def make_hook(unit: ModuleType, name: str) -> Hook:
    """The hook of a result's name; `…_without` has no error feedback."""
    makers: dict[str, Callable[[], Any]] = {
        "dense": lambda: dense,
        "fp16": lambda: given.fp16,
        "bf16": lambda: given.bf16,
        "sign1": given.Sign,
        "int8": unit.Int8,
        "topk1": lambda: unit.TopK(RATIO),
        "powersgd4": lambda: unit.PowerSGD(FACTORS),
    }
    plain = name.removesuffix("_without")
    if plain == name:
        made: Hook = makers[name]()
        return made
    if plain == "powersgd4":
        return _forgetful(makers[plain]())
    return lambda comm, bucket: makers[plain]()(comm, bucket)


def _forgetful(hook: Any) -> Hook:
    def call(comm: Comm, bucket: Any) -> Work:
        hook.residuals = given.Residuals()  # and Q is kept
        work: Work = hook(comm, bucket)
        return work

    return call


def wrap(model: nn.Module, comm: Comm, hook: Hook) -> nn.Module:
    """The reference's DistributedDataParallel, with this hook."""
    unit = load("distributed_data_parallel", "reference")
    made: nn.Module = unit.DistributedDataParallel(
        model, comm, bucket_size_mib=BUCKET_MIB, comm_hook=hook
    )
    return made


# ── bytes ───────────────────────────────────────────────────────────────────────────


def sent_bytes(
    context: RankContext, _folder: str, side: str, names: Sequence[str]
) -> dict[str, Any]:
    """Bytes that this rank sends in BYTE_STEPS steps, by the byte meter."""
    unit, found = load(UNIT, side), {}
    for name in names:
        traffic = Traffic()
        ddp = wrap(
            make_convnet(),
            ByteMeter(context.comm, traffic),
            make_hook(unit, name),
        )
        before = traffic.sent_bytes  # of the weights, which rank 0 sends
        for step in range(BYTE_STEPS):
            generator = torch.Generator().manual_seed(10 * step + context.rank)
            images = torch.rand(8, 1, SIDE, SIDE, generator=generator)
            ddp.zero_grad()
            cross_entropy(ddp(images), torch.arange(8)).backward()
        found[name] = traffic.sent_bytes - before
    return found


def shapes() -> list[tuple[int, ...]]:
    """Of the convnet's parameters."""
    return [tuple(p.shape) for p in make_convnet().parameters()]


# ── accuracy ────────────────────────────────────────────────────────────────────────


def digits() -> Images:
    """The digits in the size of the convnet's images."""
    found = load_digits_split()

    def enlarged(inputs: Tensor) -> Tensor:
        images = inputs.float().view(-1, 1, 8, 8)
        return interpolate(images, SIDE, mode="bilinear", align_corners=False)

    return Images(
        train_inputs=enlarged(found.train_inputs),
        train_targets=found.train_targets,
        held_out_inputs=enlarged(found.held_out_inputs),
        held_out_targets=found.held_out_targets,
    )


def read_data(files: dict[str, str]) -> Images:
    """Fashion-MNIST from its files, or the digits where there are none."""
    if not files:
        return digits()
    paths = {name: Path(path) for name, path in files.items()}
    return read_images(paths, known_sets()["fashion-mnist"])


def accuracy(
    context: RankContext,
    _folder: str,
    side: str,
    name: str,
    files: dict[str, str],
    epochs: int,
) -> float:
    """Percent of the held-out images, after a training with this hook."""
    torch.set_num_threads(1)
    data, rank, n = read_data(files), context.rank, context.world_size
    ddp = wrap(make_convnet(), context.comm, make_hook(load(UNIT, side), name))
    optimizer = torch.optim.SGD(ddp.parameters(), LEARNING_RATE)
    count = len(data.train_inputs)
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        for batch in order[: count // BATCH * BATCH].view(-1, BATCH):
            own = batch[rank::n]
            optimizer.zero_grad()
            outputs = ddp(data.train_inputs[own])
            cross_entropy(outputs, data.train_targets[own]).backward()
            optimizer.step()
    with torch.no_grad():
        found = torch.cat([ddp(part) for part in data.held_out_inputs.split(500)])
    right = (found.argmax(1) == data.held_out_targets).double().mean()
    return 100 * float(right)


# ── PowerSGD beside torch's ─────────────────────────────────────────────────────────


def beside_torchs(context: RankContext, folder: str, side: str) -> list[float]:
    """By step, the largest difference of a gradient from that of torch's own hook.

    Both train the convnet in torch's DDP, in float64, from the same first Q.
    """
    comm = meet(context, folder)
    state = torchs.PowerSGDState(
        None,
        matrix_approximation_rank=FACTORS,
        start_powerSGD_iter=DENSE_STEPS,
        min_compression_rate=1,  # every matrix, no bias
        orthogonalization_epsilon=0,
    )
    compress = torch_hook(load(UNIT, side).PowerSGD(FACTORS), comm)
    calls = 0

    def theirs(state, bucket):  # type: ignore[no-untyped-def]
        if state.iter >= DENSE_STEPS and bucket.index() not in state.q_memory_dict:
            _set_first_factors(state, bucket)
        return torchs.powerSGD_hook(state, bucket)

    def ours(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1  # the model is smaller than a bucket
        if calls > DENSE_STEPS:
            return compress(state, bucket)
        flat = bucket.buffer().div_(comm.world_size)
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    both = []
    for hook, held in ((ours, None), (theirs, state)):
        model = DistributedDataParallel(make_convnet().double())
        model.register_comm_hook(held, hook)
        both.append((model, torch.optim.SGD(model.parameters(), LEARNING_RATE)))
    data, gaps = digits(), []
    for step in range(DENSE_STEPS + POWER_STEPS):
        own = slice(32 * (2 * step + context.rank), 32 * (2 * step + context.rank + 1))
        for model, optimizer in both:
            optimizer.zero_grad()
            outputs = model(data.train_inputs[own].double())
            cross_entropy(outputs, data.train_targets[own]).backward()
        pairs = zip(*(model.parameters() for model, _ in both), strict=True)
        gaps.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
        for _, optimizer in both:
            optimizer.step()
    leave()
    return gaps[DENSE_STEPS:]


def _set_first_factors(state: Any, bucket: Any) -> None:
    matrices = [g.view(len(g), -1) for g in bucket.gradients() if g.dim() > 1]
    factors = [given.first_factor(m, FACTORS) for m in matrices]
    rows = sum(len(m) * q.shape[1] for m, q in zip(matrices, factors, strict=True))
    state.q_memory_dict[bucket.index()] = torch.cat([q.reshape(-1) for q in factors])
    state.p_memory_dict[bucket.index()] = matrices[0].new_zeros(rows)
