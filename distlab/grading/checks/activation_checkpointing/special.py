"""Blocks, inputs and gradients that are out of the ordinary: for tasks 2.5 and 2.23."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distlab.runner.autopsy import without_repeats

Checkpoint = Callable[[Any, Tensor], Tensor]
Case = Callable[[Checkpoint, torch.device], list[Tensor | None]]
"""Plays forward and backward; what comes out: the result, then the gradients."""

FUNCTION = "a block that is a plain function, not a module"


def faults_of(run: Checkpoint, device: torch.device) -> list[str]:
    """What goes wrong in which case, beside the block without checkpoint."""
    return [*_faults(CASES, run, device)]


def faults_of_draws(run: Checkpoint, device: torch.device) -> list[str]:
    """The same of blocks that draw random numbers, though no dropout shows it."""
    return [*_faults(DRAWING, run, device)]


def _faults(
    cases: Mapping[str, Case], run: Checkpoint, device: torch.device
) -> Iterator[str]:
    for what, case in cases.items():
        expected = case(lambda block, tensor: block(tensor), device)
        try:
            found = case(run, device)
        except Exception as error:
            said = without_repeats(str(error).partition("\n")[0])[:140]
            yield f"with {what}, your code raised {type(error).__name__}: {said}"
            continue
        for number, (got, right) in enumerate(zip(found, expected, strict=True)):
            if not _same(got, right):
                name = "the result" if not number else "a gradient"
                if number in (2, 3) and cases is DRAWING:
                    name = "torch.rand afterwards"
                yield f"with {what}, {name} {unlike(got, right)} without checkpoint"
                break


def unlike(got: Tensor | None, right: Tensor | None) -> str:
    """The first difference, as in "has 0.5 in element 3, expected 0.25 as"."""
    if got is None or right is None:
        told = ["None" if value is None else "a tensor" for value in (got, right)]
        return f"is {told[0]}, expected {told[1]} as"
    if got.shape != right.shape:
        shapes = list(got.shape), list(right.shape)
        return f"has shape {shapes[0]}, expected {shapes[1]} as"
    mine, theirs = got.reshape(-1), right.reshape(-1)
    place = int((mine != theirs).nonzero()[0])
    pairs = [
        (f"{float(mine[place]):.{digits}g}", f"{float(theirs[place]):.{digits}g}")
        for digits in (3, 6, 17)
    ]
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
    return f"has {one} in element {place}, expected {other} as"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _layer(device: torch.device) -> nn.Linear:
    layer = nn.Linear(3, 3).double()
    layer.weight.data.copy_(_numbers(3, 3))
    layer.bias.data.copy_(_numbers(3))
    return layer.to(device)


def _function(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    weight = _numbers(3, 3).to(device).requires_grad_()
    result = run(lambda tensor: (tensor @ weight).exp(), _numbers(2, 3).to(device))
    result.sum().backward()
    return [result.detach(), weight.grad]


def _strided(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    layer, start = _layer(device), _numbers(3, 4).to(device).requires_grad_()
    result = run(layer, start.t())
    result.t().backward(_numbers(3, 4).to(device))
    return [result.detach(), start.grad, layer.weight.grad]


def _empty(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    layer, start = _layer(device), _numbers(0, 3).to(device).requires_grad_()
    result = run(layer, start)
    result.sum().backward()
    return [result.detach(), start.grad, layer.weight.grad]


def _infinite(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    layer, start = _layer(device), torch.ones(1, 3).double().to(device)
    arriving = torch.tensor([[torch.inf, 1.0, -2.0]], dtype=torch.float64)
    result = run(layer, start)
    result.backward(arriving.to(device))
    return [result.detach(), layer.weight.grad, layer.bias.grad]


def _no_gradient(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    layer, start = _layer(device), _numbers(2, 3).to(device).requires_grad_()
    result = run(layer, start)
    result.backward(torch.zeros_like(result))
    return [result.detach(), start.grad, layer.weight.grad]


def _frozen(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    layers = [_layer(device) for _ in range(3)]
    result = _numbers(2, 3).to(device)
    for layer, is_trained in zip(layers, (False, True, False), strict=True):
        layer.requires_grad_(is_trained)
        result = run(layer, result)
    result.sum().backward()
    return [result.detach(), *(layer.weight.grad for layer in layers)]


CASES: dict[str, Case] = {
    FUNCTION: _function,
    "an input that is a transposed view": _strided,
    "a batch of 0 samples": _empty,
    "an incoming gradient that is inf in one place": _infinite,
    "an incoming gradient of zeros": _no_gradient,
    "frozen blocks before and after a trained one": _frozen,
}


# ── blocks that draw ────────────────────────────────────────────────────────────────


class _Noisy(nn.Module):
    """Multiplies by drawn numbers, in evaluation mode, too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor @ self.weight * torch.rand_like(tensor)


def _draws(block: Any, weight: Tensor, run: Checkpoint) -> list[Tensor | None]:
    """The second block of the same kind draws other numbers than the first."""
    torch.manual_seed(5)
    result = run(block, run(block, _numbers(2, 3).to(weight.device)))
    between = torch.rand(2)
    result.sum().backward()
    return [result.detach(), weight.grad, between, torch.rand(2)]


def _drawing_function(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    weight = _numbers(3, 3).to(device).requires_grad_()
    return _draws(lambda x: x @ weight * torch.rand_like(x), weight, run)


def _drawing_evaluation(run: Checkpoint, device: torch.device) -> list[Tensor | None]:
    block = _Noisy(_numbers(3, 3).to(device)).eval()
    return _draws(block, block.weight, run)


DRAWING: dict[str, Case] = {
    f"{FUNCTION}, and draws random numbers": _drawing_function,
    "a block that draws random numbers in evaluation mode": _drawing_evaluation,
}
