"""The parts of distlab.distributed beside torch's, on the same inputs.

Samplers by what they draw, the loss scaler over steps in which gradients overflow,
activation checkpointing under autocast, gradient clipping on several ranks, and a
resume from a checkpoint with each of torch's optimizers. A case's result is the largest
difference on any rank: of weights, gradients, scales or drawn indices.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import distlab.distributed as dist
from distlab.curriculum import load
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import Cluster, Limits, RankContext
from tests.corpora.beside_torch.ddp import Case, gap
from tests.corpora.both_ways import leave, meet

LIMITS = Limits(seconds=60.0)
SIZES = (1, 2, 3, 7, 8, 23)
WORLD_SIZES = (1, 2, 3, 5)


# ── samplers: no rank is needed to ask what each would draw ─────────────────────────


def sampler_in_order() -> float:
    """The number of indices that differ without a shuffle."""
    wrong = 0
    for size, n, drop_last in _settings():
        for rank in range(n):
            mine, torchs = _samplers(size, n, rank, drop_last, shuffle=False)
            wrong += list(mine) != list(torchs) or len(mine) != len(torchs)
    return float(wrong)


def sampler_shuffled() -> float:
    """How many epochs differ in how often the ranks together draw a sample."""
    wrong = 0
    for size, n, drop_last in _settings():
        for epoch in range(3):
            drawn: list[Counter[int]] = []
            for which in (0, 1):
                counts: Counter[int] = Counter()
                for rank in range(n):
                    sampler = _samplers(size, n, rank, drop_last, shuffle=True)[which]
                    sampler.set_epoch(epoch)
                    counts.update(sampler)
                drawn.append(Counter(counts.values()))
            wrong += drawn[0] != drawn[1]
    return float(wrong)


def sampler_in_a_loader() -> float:
    """The batches of three epochs, each after a look at a batch that nobody trains."""
    wrong = 0
    for workers in (0, 2):
        ours, torchs = _samplers(12, 2, 0, drop_last=False, shuffle=False)
        for epoch in range(3):
            batches = []
            for sampler in (ours, torchs):
                loader: DataLoader[int] = DataLoader(
                    range(12),  # type: ignore[arg-type]
                    batch_size=2,
                    sampler=sampler,
                    num_workers=workers,
                )
                sampler.set_epoch(epoch)
                next(iter(loader))
                batches.append([batch.tolist() for batch in loader])
            wrong += batches[0] != batches[1]
    return float(wrong)


def _settings() -> list[tuple[int, int, bool]]:
    return [
        (size, n, drop_last)
        for size in SIZES
        for n in WORLD_SIZES
        for drop_last in (False, True)
        if size >= n or not drop_last  # torch's own drop_last needs a sample per rank
    ]


def _samplers(
    size: int, n: int, rank: int, drop_last: bool, shuffle: bool
) -> tuple[dist.DistributedSampler, TorchSampler[int]]:
    ours = dist.DistributedSampler(
        dataset_size=size,
        num_replicas=n,
        rank=rank,
        shuffle=shuffle,
        seed=3,
        drop_last=drop_last,
    )
    torchs: TorchSampler[int] = TorchSampler(
        range(size),  # type: ignore[arg-type]
        num_replicas=n,
        rank=rank,
        shuffle=shuffle,
        seed=3,
        drop_last=drop_last,
    )
    return ours, torchs


# ── on ranks ────────────────────────────────────────────────────────────────────────


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def _scaled(
    make: Callable[[], Any], optimizers: int, clips: bool, accumulates: int
) -> list[Tensor]:
    """Weights and scales of ten steps, of which two overflow."""
    nets = [_net(k) for k in range(optimizers)]
    steppers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    scaler, kept = make(), []
    for step in range(10):
        for micro in range(accumulates):
            x = torch.full((3, 4), 0.1 * (step + micro), dtype=torch.double)
            loss = sum((net(x).square().mean() for net in nets), torch.zeros(()))
            if step in (2, 6):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        for k, (net, stepper) in enumerate(zip(nets, steppers, strict=True)):
            if clips and k == 0:
                scaler.unscale_(stepper)
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            scaler.step(stepper)
        scaler.update()
        for net, stepper in zip(nets, steppers, strict=True):
            stepper.zero_grad()
            kept += [p.detach().clone() for p in net.parameters()]
        state = scaler.state_dict()
        kept.append(torch.tensor(state.get("scale", state.get("loss_scale"))).double())
    return kept


def scaler_case(
    _: RankContext,
    __: str,
    optimizers: int = 1,
    clips: bool = False,
    accumulates: int = 1,
) -> float:
    """The unit's LossScaler beside torch.amp.GradScaler."""
    scaler = load("mixed_precision", "reference").LossScaler
    start, interval = 4.0, 3
    ours = partial(
        scaler, dist.default_comm(), init_scale=start, growth_interval=interval
    )
    torchs = partial(
        torch.amp.GradScaler, "cpu", init_scale=start, growth_interval=interval
    )
    arguments = (optimizers, clips, accumulates)
    return gap(list(_scaled(ours, *arguments)), list(_scaled(torchs, *arguments)))


def checkpoint_case(
    _: RankContext, __: str, layer: Callable[[], nn.Module], autocast: bool
) -> float:
    """The same blocks with checkpoint_scope and without.

    Without, because torch's own checkpoint updates a batch norm's statistics twice.
    """
    results = []
    for how in ("ours", "plain"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), layer(), nn.Tanh()) for _ in range(3)]
        x = torch.randn(6, 8)
        cast: AbstractContextManager[Any] = (
            torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        )
        scope = dist.checkpoint_scope(*blocks) if how == "ours" else nullcontext()
        with scope, cast:
            out = nn.Sequential(*blocks)(x)
        out.float().square().mean().backward()
        kept = [t for block in blocks for t in (*block.parameters(), *block.buffers())]
        grads = [p.grad for block in blocks for p in block.parameters()]
        results.append([*(t.detach().double() for t in kept), *grads])
    return gap(*results)


def clip_case(context: RankContext, _: str, max_norm: float) -> float:
    """Torch's clip_grad_norm_ after both wrappers' backward()."""
    results = []
    for wrap in (
        lambda net: dist.DistributedDataParallel(net, bucket_size_mib=0.0002),
        lambda net: nn.parallel.DistributedDataParallel(net),
    ):
        net = _net()
        model = wrap(net)
        model(torch.full((2, 4), context.rank + 1.0).double()).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        results.append([norm, *(p.grad for p in net.parameters())])
    return gap(*results)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.5, max_iter=4, history_size=3),
}


def resume_case(context: RankContext, folder: str, name: str) -> float:
    """Three steps, a checkpoint, three more: beside torch.save on one rank."""
    results = []
    for how in ("ours", "torch's"):
        place = Path(folder, how)
        place.mkdir(exist_ok=True)
        net = _net()
        optimizer = OPTIMIZERS[name](net.parameters())
        _steps(net, optimizer, 0)
        if how == "ours":
            dist.save_checkpoint(place, 3, net, optimizer)
        else:
            whole = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(whole, place / f"{context.rank}.pt")
        net = _net(5)
        optimizer = OPTIMIZERS[name](net.parameters())
        if how == "ours":
            assert dist.load_checkpoint(place, net, optimizer) == 3
        else:
            found = torch.load(place / f"{context.rank}.pt", weights_only=True)
            net.load_state_dict(found["net"])
            optimizer.load_state_dict(found["optimizer"])
        _steps(net, optimizer, 3)
        results.append([p.detach().clone() for p in net.parameters()])
    return gap(list(results[0]), list(results[1]))


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + 3):
        x = torch.full((2, 4), 0.1 * step).double()

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = (net(x) - 1).square().sum()
            loss.backward()
            return float(loss)

        optimizer.step(closure)


# ── the table ───────────────────────────────────────────────────────────────────────

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear layers": partial(nn.Linear, 8, 8),
    "dropout": partial(nn.Dropout, 0.5),
    "batch norm": partial(nn.BatchNorm1d, 8),
    "layer norm": partial(nn.LayerNorm, 8),
}
ALONE: dict[str, Callable[[], float]] = {
    "sampler in order": sampler_in_order,
    "sampler shuffled": sampler_shuffled,
    "sampler after a look": sampler_in_a_loader,
}
ON_ONE: dict[str, Callable[[RankContext, str], float]] = {
    "scaler": scaler_case,
    "scaler, 3 optimizers": partial(scaler_case, optimizers=3),
    "scaler, clipped": partial(scaler_case, optimizers=2, clips=True),
    "scaler, accumulated": partial(scaler_case, accumulates=2),
    **{
        f"checkpoint of {layer}{', autocast' * autocast}": partial(
            checkpoint_case, layer=make, autocast=autocast
        )
        for layer, make in LAYERS.items()
        for autocast in (False, True)
    },
    **{f"resumed {name}": partial(resume_case, name=name) for name in OPTIMIZERS},
}
ON_SEVERAL: dict[str, Callable[[RankContext, str], float]] = {
    "clipped to 0.1": partial(clip_case, max_norm=0.1),
    "not clipped": partial(clip_case, max_norm=1e6),
    **{f"resumed {name}": partial(resume_case, name=name) for name in ("SGD", "Adam")},
}


def play_case(context: RankContext, folder: str, name: str) -> float:
    """One case on this rank, in a group of each library."""
    meet(context, folder)
    like_torchrun(context, 30.0)
    dist.init_process_group("gloo", timeout_s=30)
    value = {**ON_ONE, **ON_SEVERAL}[name](context, folder)
    dist.destroy_process_group()
    leave()
    return value


def largest(cluster: Cluster, name: str, num_ranks: int) -> float:
    """The largest difference on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run = cluster.run(
            play_case, num_ranks, folder, name, limits=LIMITS, journal=False
        )
    assert run.outcome == "finished", run.explanation
    return max(float(value) for value in run.values)


def alone(_: Cluster, name: str) -> float:
    """A case that asks the samplers of all ranks in this process."""
    return ALONE[name]()


def cases() -> list[Case]:
    """Those that need no ranks first."""
    return [
        *(Case(name, 1, partial(alone, name=name)) for name in ALONE),
        *(Case(name, 1, partial(largest, name=name, num_ranks=1)) for name in ON_ONE),
        *(
            Case(name, n, partial(largest, name=name, num_ranks=n))
            for name in ON_SEVERAL
            for n in (2, 3)
        ),
    ]
