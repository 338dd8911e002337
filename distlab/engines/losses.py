"""Find out what a loss is the mean of, so we can combine ranks and microbatches.

Most losses are means over samples. But a cross-entropy with class weights or ignored
targets divides by the total weight of the targets that count. In that case, averaging
the losses of two ranks doesn't give the loss of all their samples:

    targets   0 0 | 0 ignored      each rank's mean: 2 targets, 1 target
    together  the mean over 3      not the mean of the two means

So we record each loss together with its divisor. Each rank multiplies its gradients by
its divisor, and once per step all ranks divide by the sum over ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.overrides import TorchFunctionMode

from distlab.engines.expect import EngineError

Loss = Callable[..., Tensor]
COUNTING = (cross_entropy, nll_loss)


@dataclass(frozen=True)
class Value:
    """The loss of some samples."""

    loss: Tensor
    count: Tensor | None = None
    """The divisor of the mean; None means the number of samples."""
    is_sum: bool = False
    is_mixed: bool = False
    """A counted mean was combined with something else, so no count fits both."""
    ignored: int | None = None
    """The target that is ignored."""


@dataclass(frozen=True)
class Call:
    """One call of a reducing function in torch.nn.functional."""

    result: Tensor
    reduction: str
    count: Tensor | None = None
    ignored: int | None = None
    num_targets: int = 0


class Watch(TorchFunctionMode):
    """Records the reductions inside a loss while it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in COUNTING:
            bound = signature(func).bind(*args, **given)
            bound.apply_defaults()
            # These two are older names of `reduction`.
            if bound.arguments["size_average"] is bound.arguments["reduce"] is None:
                call = _counted(func, bound.arguments)
                self.calls.append(call)
                return call.result
        result = func(*args, **given)
        if given.get("reduction") == "sum":
            self.calls.append(Call(result, "sum"))
        return result


def _counted(func: Any, given: dict[str, Any]) -> Call:
    own = {name: given[name] for name in ("input", "target", "weight", "ignore_index")}
    if "label_smoothing" in given:
        own["label_smoothing"] = given["label_smoothing"]
    reduction, target = given["reduction"], own["target"]
    count = None
    if reduction == "mean" and not target.is_floating_point():
        weight, ignored = own["weight"], own["ignore_index"]
        counts = target != ignored
        if weight is None:
            count = counts.sum(dtype=torch.double)
        else:
            chosen = torch.where(counts, target, 0)
            count = (weight.double()[chosen] * counts).sum()
        if not count:  # every target is ignored: the mean would be 0 / 0
            reduction = "sum"
    result = func(**own, reduction=reduction)
    return Call(
        result,
        given["reduction"],
        count,
        own["ignore_index"] if count is not None else None,
        target.numel(),
    )


def measure(loss: Loss, outputs: Any, targets: Any) -> Value:
    """Compute a loss and find its divisor.

    Raises:
        EngineError: the loss doesn't return a single number.
    """
    # A compiled loss makes no calls that we could watch, so use the original.
    loss = getattr(loss, "_torchdynamo_orig_callable", loss)
    with Watch() as watch:
        value = getattr(loss, "_orig_mod", loss)(outputs, targets)
    if not isinstance(value, Tensor):
        raise EngineError(
            f"the loss returns a {type(value).__name__}, must return a tensor of one "
            "number"
        )
    if value.numel() != 1:
        raise EngineError(
            f"the loss returns {value.numel()} numbers, must return one: use "
            "reduction='mean'"
        )
    scalar = value.reshape(())
    if getattr(loss, "reduction", None) == "sum":
        return Value(scalar, is_sum=True)
    for call in watch.calls:
        if call.result is value:
            is_sum = call.reduction == "sum"
            return Value(scalar, call.count, is_sum=is_sum, ignored=call.ignored)
    return Value(scalar, is_mixed=any(_is_unusual(call) for call in watch.calls))


def _is_unusual(call: Call) -> bool:
    return call.count is not None and float(call.count) != call.num_targets


def own_parameters(loss: Any, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a loss's own parameters by name, such as a temperature.

    Parameters that also belong to the model are left out.
    """
    if not isinstance(loss, nn.Module):
        return {}
    shared = {id(p) for p in model.parameters()}
    return {n: p for n, p in loss.named_parameters() if id(p) not in shared}


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield all tensors in a model's outputs."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from tensors_in(one)
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            yield from tensors_in(one)
    elif hasattr(outputs, "__dict__"):
        yield from tensors_in(vars(outputs))
