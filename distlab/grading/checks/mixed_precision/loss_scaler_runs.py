"""What ranks do for the checks of 2.7, and what a right or wrong scaler does there.

Every rank has parameters of its own, as in model parallelism. Its gradients go through
float16 on their way back, so that they overflow and underflow by themselves:

    step     0 1 2   3  4    5    6 7 8   9 10 11   12 13 14   15   16   17
    overflow            nan  nan                                inf
    S        1024    2048    1024 512     1024      2048       4096 2048
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.runner import RankContext

STEPS = 18
INIT_SCALE = 1024.0
GROWTH_INTERVAL = 3
GROWTH, BACKOFF = 2.0, 0.5
LOUD = 20.0  # times 4096 it is more than float16 can hold
QUIET = 2.0**-26  # less than the smallest float16; times 512 it is not
RESUME_AT = 10  # one step after the scale has grown: the count is 1
NO_GRADIENT_AT = 7  # on rank 0
HUGE, HUGES = 3e38, 2048  # finite; their squares and their sum are not, in float32
HUGE_AT = 1
TWICE_AT = 2  # unscale_ is called twice
SETTINGS = {
    "init_scale": INIT_SCALE,
    "growth_factor": GROWTH,
    "backoff_factor": BACKOFF,
    "growth_interval": GROWTH_INTERVAL,
}


# What there is among the parameters that an error may be about.
KINDS = {
    "'NoneType' and 'float'": "with a .grad that is None",
    "view size": "with a transposed gradient",
    "numel() == 0": "with a gradient of 0 elements",
    "grad_dtype 'Double'": "with a float64 parameter",
}


# Which numbers of a gradient which master has: nan comes to the second one, inf to the
# third, so that whoever looks at the first one only, or at the first group, sees none.
_PARTS = (slice(4, 6), slice(0, 2), slice(2, 4))


class CountedSGD:
    """Plain SGD that counts its steps; an optimizer as far as a scaler can tell."""

    def __init__(self, *groups: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": group} for group in groups]
        self.num_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad = None

    def step(self, closure: Any = None) -> None:
        """See `torch.optim.Optimizer.step`."""
        self.num_steps += 1


def raw_gradient(seed: int, step: int, rank: int, n: int) -> Tensor:
    """What float32 would have: (2, 3), with one number too small for float16."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    gradient = torch.rand(2, 3, generator=generator) + 1.0
    gradient[1, 1] = QUIET
    if rank == n // 2:
        gradient[0, 2] = -LOUD
    if (step, rank) in {(4, n - 1), (5, 0)}:
        gradient[0, 0] = float("nan")
    return gradient


def halved(gradient: Tensor, scale: float) -> Tensor:
    """The scaled gradient after its way through float16."""
    return (gradient * scale).half().float()


def scaled_steps(
    context: RankContext, unit: ModuleType, seed: int, resume: bool = False
) -> list[dict[str, Any]]:
    """STEPS steps; with `resume` another scaler takes over the state at RESUME_AT."""
    comm = context.comm
    half = nn.Parameter(torch.ones(2, 3, dtype=torch.float16, device=comm.device))
    masters = [nn.Parameter(torch.ones(2, device=comm.device)) for _ in _PARTS]
    never = nn.Parameter(torch.ones(3, device=comm.device))  # has a gradient
    huge = nn.Parameter(torch.ones(HUGES, device=comm.device))
    others = _others(comm)
    optimizer = CountedSGD([masters[0], never, huge, masters[1]], [*others, masters[2]])
    scaler = unit.LossScaler(comm, **SETTINGS)
    record = []
    for step in range(STEPS):
        if resume and step == RESUME_AT:
            state = scaler.state_dict()
            scaler = unit.LossScaler(comm, **SETTINGS)
            scaler.load_state_dict(state)
        optimizer.zero_grad()
        _backward(scaler, half, seed, step, comm)
        has_gradient = step != NO_GRADIENT_AT or comm.rank > 0
        _hand_out(half.grad if has_gradient else None, masters)
        for other in others if has_gradient else ():
            other.grad = torch.ones_like(other)
        huge.grad = torch.full_like(huge, HUGE) if step == HUGE_AT else None
        record.append(_step(scaler, optimizer, masters, step))
    record[-1]["below"] = _below_one(unit, comm)
    record[-1]["two"] = _two_optimizers(unit, comm)
    record[-1]["sooner"] = _sooner(unit, comm)
    record[-1]["narrow"] = _narrow(unit, comm)
    record[-1]["behind"] = _behind_an_inf(unit, comm)
    return record


def _others(comm: Any) -> list[nn.Parameter]:
    """On each rank another number: without elements or dimensions, strided, float64."""
    wide = torch.ones(3, 2, dtype=torch.float64, device=comm.device)
    strided = [nn.Parameter(wide.clone().t()) for _ in range(comm.rank + 1)]
    scalar = nn.Parameter(torch.ones((), device=comm.device))
    return [nn.Parameter(torch.ones(0, device=comm.device)), scalar, *strided]


OTHER = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1}


def _below_one(unit: ModuleType, comm: Any) -> list[float]:
    """The scales of another scaler, after an overflow at 1 and after a good step."""
    scaler = unit.LossScaler(comm, init_scale=1.0, **OTHER)
    parameter = nn.Parameter(torch.ones(1, device=comm.device))
    found = []
    for value in (torch.inf, 1.0):
        parameter.grad = torch.full_like(parameter, value)
        scaler.step(CountedSGD([parameter]))
        scaler.update()
        found.append(float(scaler.loss_scale))
    return found


SLOPES = (3.0, 5.0)  # the gradients of two optimizers' parameters
TWO_SCALES = [8.0, 4.0, 2.0]  # after a good step, and after an overflow of each
TWO_STEPS = [[1, 1], [0, 1], [1, 0]]
TWO_WHEN = (
    "with two optimizers and no inf",
    "when only the first of two optimizers has an inf gradient",
    "when only the second of two optimizers has an inf gradient",
)


def _two_optimizers(unit: ModuleType, comm: Any) -> dict[str, Any]:
    """Three steps with two optimizers; in the second and third one of them overflows.

    The gradients of the first one are wanted before its step, as for clipping.
    """
    scaler = unit.LossScaler(comm, init_scale=TWO_SCALES[0], growth_interval=100)
    own = [nn.Parameter(torch.ones(2, device=comm.device)) for _ in SLOPES]
    optimizers = [CountedSGD([parameter]) for parameter in own]
    overflows = {(1, 0): comm.world_size - 1, (2, 1): 0}  # (step, optimizer): its rank
    found: dict[str, Any] = {"grads": [], "steps": [], "scales": []}
    for step in range(len(TWO_SCALES)):
        parts = []
        for number, parameter in enumerate(own):
            parameter.grad = None
            is_bad = overflows.get((step, number)) == comm.rank
            parts.append((parameter * (torch.inf if is_bad else SLOPES[number])).sum())
        scaled = scaler.scale(parts[0] + parts[1])
        if isinstance(scaled, Tensor) and scaled.requires_grad:
            scaled.backward()
        before = [optimizer.num_steps for optimizer in optimizers]
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        counts = zip(optimizers, before, strict=True)
        found["steps"].append([one.num_steps - count for one, count in counts])
        found["grads"].append([p.grad if p.grad is None else p.grad.cpu() for p in own])
        found["scales"].append(float(scaler.loss_scale))
    return found


def _sooner(unit: ModuleType, comm: Any) -> float:
    """The scale after a good step, where the interval became smaller than the count."""
    scaler = unit.LossScaler(comm, init_scale=1.0, growth_interval=5)
    parameter = nn.Parameter(torch.ones(1, device=comm.device))
    for step in range(4):
        if step == 3:
            scaler.growth_interval = 3
        parameter.grad = torch.ones_like(parameter)
        scaler.step(CountedSGD([parameter]))
        scaler.update()
    return float(scaler.loss_scale)


NARROW = 2.0**15, 2.0**16  # a gradient in float16, and a scale that is inf there


def _narrow(unit: ModuleType, comm: Any) -> Tensor:
    """A float16 gradient after unscale_, with a scale that float16 can't hold."""
    scaler = unit.LossScaler(comm, init_scale=NARROW[1])
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16, device=comm.device))
    parameter.grad = torch.full_like(parameter, NARROW[0])
    scaler.unscale_(CountedSGD([parameter]))
    return parameter.grad.float().cpu()


BEHIND = 24.0, 8.0  # a gradient, and the scale


def _behind_an_inf(unit: ModuleType, comm: Any) -> float:
    """A gradient after unscale_, where the parameter before has an inf."""
    scaler = unit.LossScaler(comm, init_scale=BEHIND[1])
    parameters = [nn.Parameter(torch.ones(1, device=comm.device)) for _ in range(2)]
    for parameter, gradient in zip(parameters, (torch.inf, BEHIND[0]), strict=True):
        parameter.grad = torch.full_like(parameter, gradient)
    scaler.unscale_(CountedSGD(parameters))
    return float(parameters[1].grad)  # type: ignore[arg-type]


def _hand_out(gradient: Tensor | None, masters: list[nn.Parameter]) -> None:
    for master, part in zip(masters, _PARTS, strict=True):
        master.grad = None
        if gradient is not None:
            master.grad = gradient.reshape(-1)[part].float()


def _gathered(masters: list[nn.Parameter]) -> Tensor | None:
    """The gradient of which each has a part, as it is now."""
    whole = torch.empty(6)
    for master, part in zip(masters, _PARTS, strict=True):
        if master.grad is None:
            return None
        whole[part] = master.grad.detach().cpu()
    return whole.view(2, 3)


def _backward(scaler: Any, half: nn.Parameter, seed: int, step: int, comm: Any) -> None:
    gradient = raw_gradient(seed, step, comm.rank, comm.world_size).to(comm.device)
    half.grad = None
    loss = (half.float() * gradient).sum()
    scaled = scaler.scale(loss)
    if isinstance(scaled, Tensor) and scaled.requires_grad:
        scaled.backward()


def _step(
    scaler: Any, optimizer: CountedSGD, masters: list[nn.Parameter], step: int
) -> dict[str, Any]:
    """In every second step the gradients are wanted before, as for clipping."""
    scale, steps = scaler.loss_scale, optimizer.num_steps
    came = _gathered(masters)
    early = again = None
    if step % 2 == 0:
        scaler.unscale_(optimizer)
        early = _gathered(masters)
        if step == TWICE_AT:
            scaler.unscale_(optimizer)
            again = _gathered(masters)
    said = scaler.step(optimizer)
    after = _gathered(masters)
    scaler.update()
    return {
        "scale": float(scale),
        "next": float(scaler.loss_scale),
        "came": came,
        "early": early,
        "again": again,
        "after": after,
        "said": said if isinstance(said, bool) else repr(said)[:20],
        "steps": optimizer.num_steps - steps,
    }


# ── what a scaler does there, right or wrong ────────────────────────────────────────

Flags = list[bool]
Decide = Callable[[Flags, int], bool]
"""`(own overflow of each rank, rank)` → whether `rank` takes it for an overflow."""


def any_rank(flags: Flags, rank: int) -> bool:
    """The right decision."""
    return any(flags)


def own_rank(flags: Flags, rank: int) -> bool:
    """The decision of a rank that asks nobody."""
    return flags[rank]


@dataclass
class Staircase:
    """The scale and the count of one rank; how it counts can be wrong in several ways.

    `resets` says whether an overflow ends the count, `again` whether growing does.
    """

    scale: float = INIT_SCALE
    count: int = 0
    interval: int = GROWTH_INTERVAL
    growth: float = GROWTH
    backoff: float = BACKOFF
    resets: bool = True
    again: bool = True

    def after(self, overflow: bool) -> None:
        """One step further."""
        if overflow:
            self.scale *= self.backoff
            self.count = 0 if self.resets else self.count
            return
        self.count += 1
        if self.count >= self.interval:
            self.scale *= self.growth
            self.count = 0 if self.again else self.count


def scales(
    seed: int,
    n: int,
    decide: Decide = any_rank,
    forgets: bool = False,
    **how: Any,
) -> list[list[float]]:
    """Each rank's scale after each step; `forgets`: resuming begins the count anew."""
    stairs = [Staircase(**how) for _ in range(n)]
    found: list[list[float]] = [[] for _ in range(n)]
    for step in range(STEPS):
        if forgets and step == RESUME_AT:
            for one in stairs:
                one.count = 0
        flags = [_overflows(seed, step, r, n, stairs[r].scale) for r in range(n)]
        for rank, one in enumerate(stairs):
            one.after(decide(flags, rank))
            found[rank].append(one.scale)
    return found


def _overflows(seed: int, step: int, rank: int, n: int, scale: float) -> bool:
    if step == NO_GRADIENT_AT and rank == 0:
        return False
    gradient = halved(raw_gradient(seed, step, rank, n), scale)
    return not bool(gradient.isfinite().all())
