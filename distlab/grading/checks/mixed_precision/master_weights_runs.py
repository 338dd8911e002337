"""What ranks do for the checks of 2.6: a small 16-bit model, updated by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.runner import RankContext

STEPS = 3
TINY = 1e-3
"""An update: bfloat16's next number after 1 is 1.0078, so 1 + TINY is 1."""

LEARNING_RATE = 0.25
_SHAPES = {"weight": (3, 4), "gain": (5,), "frozen": (3,), "scale": (), "rare": (6,)}


class Small(nn.Module):
    """`weight` and `rare` are narrow, `gain` is float32 as a norm's often is.

    In float16 the columns of `weight` lie side by side in memory, and so do those of
    its gradient.
    `frozen` is not trained; `scale` has no dimension; `rare` has no gradient in the
    second step. With `tied`, `weight` is a parameter of `head`, too.
    """

    def __init__(self, dtype: torch.dtype, seed: int, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in _SHAPES.items():
            values = torch.randn(shape, generator=generator)
            if name == "weight" and dtype == torch.float16:
                values = values.t().contiguous().t()
            own = torch.float32 if name == "gain" else dtype
            self.register_parameter(name, nn.Parameter(values.to(own)))
        self.frozen: nn.Parameter
        self.frozen.requires_grad_(False)
        if tied:
            self.head = nn.Module()
            self.head.register_parameter("weight", self.get_parameter("weight"))

    def trained(self) -> dict[str, nn.Parameter]:
        """By name, in the model's order."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad}


def tiny_updates(
    context: RankContext, unit: ModuleType, seed: int, count: int
) -> dict[str, Any]:
    """`count` times: a tiny step of the master, then down to a model of ones."""
    model = Small(torch.bfloat16, seed).bfloat16().to(context.comm.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    trained = list(model.trained().values())
    start = _flat(trained)
    copies = unit.master_copy(model)
    odd = _odd(copies)
    if odd:
        return {"odd": odd}
    found = {
        "odd": "",
        "start": start,
        "first": _flat(copies),
        "shapes": [tuple(copy.shape) for copy in copies],
        "expected_shapes": [tuple(p.shape) for p in trained],
        "followed": any(not copy.is_leaf for copy in copies),
        "dtypes": [str(copy.dtype).removeprefix("torch.") for copy in copies],
    }
    if found["shapes"] == found["expected_shapes"]:
        for _ in range(count):
            with torch.no_grad():
                for copy in copies:
                    copy += TINY
            unit.master_to_model(copies, model)
    return {**found, "copies": _flat(copies), **_special(context, unit, seed)}


def _special(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """`shared`: a parameter of which the copy is no copy; how many, of a tied model."""
    model = Small(torch.bfloat16, seed, tied=True).to(context.comm.device)
    trained, copies = model.trained(), unit.master_copy(model)
    masters = dict(zip(trained, copies, strict=False))
    counts = len(trained), len(copies)
    return {"shared": _same_memory(masters, trained), "counts": counts}


def _same_memory(masters: dict[str, Tensor], own: dict[str, nn.Parameter]) -> str:
    same = (n for n, m in masters.items() if m.data_ptr() == own[n].data_ptr())
    return next(same, "")


def up_step_down(
    context: RankContext, unit: ModuleType, seed: int, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """STEPS steps of SGD, each rank with gradients of its own."""
    comm = context.comm
    model = Small(getattr(torch, dtype), seed).to(comm.device)
    dtypes = _dtypes(model)
    copies = unit.master_copy(model)
    if _odd(copies) or len(copies) != len(model.trained()):
        return {"dtypes": dtypes, "up": [], "down": []}
    ups, downs = [], []
    for step in range(STEPS):
        _backward(model, seed, step, comm.rank)
        trained = model.trained()
        if step == STEPS - 1:  # a multiple of what is there would be nan
            for copy in copies:
                copy.grad = torch.full_like(copy, torch.nan)
        own = {name: _wide(p.grad) for name, p in trained.items()}
        masters = dict(zip(trained, copies, strict=True))
        before = {name: _wide(copy) for name, copy in masters.items()}
        unit.gradients_to_master(comm, model, copies)
        ups.append(
            {
                "own": own,
                "up": {name: _wide(copy.grad) for name, copy in masters.items()},
                "left": _left(model),
                "changed": _changed(before, masters, trained),
            }
        )
        for copy in copies:
            if copy.grad is not None:
                copy.data -= LEARNING_RATE * copy.grad
        downs.append(_down(unit, model, copies))
    return {"dtypes": dtypes, "up": ups, "down": downs}


def _changed(
    before: dict[str, Tensor], masters: dict[str, Tensor], own: dict[str, nn.Parameter]
) -> tuple[str, bool]:
    """A master that gradients_to_master has changed; whether it is the model's now."""
    for name, copy in masters.items():
        if not torch.equal(_wide(copy), before[name]):
            return name, torch.equal(_wide(copy), _wide(own[name]))
    return "", False


def _down(unit: ModuleType, model: Small, copies: Any) -> dict[str, Any]:
    before = dict(model.named_parameters())
    values = {name: _wide(p) for name, p in before.items()}
    masters = dict(
        zip(model.trained(), [c.detach().clone() for c in copies], strict=True)
    )
    unit.master_to_model(copies, model)
    after = dict(model.named_parameters())
    expected = {n: _wide(m.to(before[n].dtype)) for n, m in masters.items()}
    return {
        "before": values,
        "model": {name: _wide(p) for name, p in after.items()},
        "expected": {**values, **expected},
        "dtypes": _dtypes(model),
        "replaced": next((n for n, p in after.items() if p is not before[n]), ""),
        "shared": _same_memory(dict(zip(model.trained(), copies, strict=True)), after),
    }


def _backward(model: Small, seed: int, step: int, rank: int) -> None:
    """Give each trained parameter a random gradient, the way backward() does.

    In the last step that of `gain` has an inf on rank 0; in the first one it is zero on
    rank 1.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    loss = torch.zeros(())
    for name, parameter in model.trained().items():
        gradient = torch.randn(parameter.shape, generator=generator) * 4
        if (name, step, rank) == ("gain", STEPS - 1, 0):
            gradient[1] = torch.inf
        if (name, step, rank) == ("gain", 0, 1):
            gradient.zero_()
        if name != "rare" or step != 1:
            loss = loss + (parameter.float() * gradient.to(parameter.device)).sum()
    loss.backward()


def _odd(copies: Any) -> str:
    """What master_copy gave instead of a list of tensors, or nothing."""
    if not isinstance(copies, list | tuple):
        return f"{copies!r:.40}" if copies is None else type(copies).__name__
    strange = [type(c).__name__ for c in copies if not isinstance(c, Tensor)]
    return f"a list with a {strange[0]}" if strange else ""


def _left(model: nn.Module) -> str:
    """A parameter that still has a gradient other than zeros."""
    grads = {n: p.grad for n, p in model.named_parameters()}
    return next((n for n, g in grads.items() if g is not None and g.any()), "")


def _dtypes(model: nn.Module) -> dict[str, str]:
    return {n: str(p.dtype).removeprefix("torch.") for n, p in model.named_parameters()}


def _wide(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().to("cpu", torch.float64).clone()


def _flat(tensors: Any) -> Tensor:
    if not len(tensors):
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([_wide(tensor).reshape(-1) for tensor in tensors])
