"""What each backward() starts from: how much one element of the loss weighs.

We read that from the autograd graph. From the loss towards the leaves we follow
divisions and products with one number, and sums, until a mean or a sum over elements
comes: `cross_entropy(x, y) / 4` with 3 targets is 3 elements that weigh 1/12 each.
A sum that is divided by a whole number is a mean over so many: `(l * mask).sum() / 5`.
Where the way is another (a tensor of weights, for example) the term is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.audit.fingerprints import unseen
from distlab.audit.log import Memory
from distlab.audit.watching.patches import Patches

_FAR = 40  # operations between the loss and its mean
_ADDING = frozenset(("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0"))
_THROUGH = frozenset(
    (
        *("ViewBackward0", "CloneBackward0", "ToCopyBackward0", "SqueezeBackward0"),
        *("UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
        *("AliasBackward0",),
    )
)
_ELEMENTWISE = frozenset(
    (
        *(
            "MseLossBackward0",
            "L1LossBackward0",
            "SmoothL1LossBackward0",
            "KlDivBackward0",
        ),
        *("HuberLossBackward0", "BinaryCrossEntropyBackward0"),
        *("BinaryCrossEntropyWithLogitsBackward0",),
    )
)
_NLL = frozenset(("NllLossBackward0", "NllLoss2DBackward0"))
MEAN, SUM = 1, 2

Term = tuple[float, float]
"""How much one element weighs, and how many there are."""


def watch(patches: Patches) -> None:
    """Install the hook."""
    patches.observe(torch.autograd, "backward", before=_backward)


def _backward(memory: Memory, tensors: Any, *args: Any, **kwargs: Any) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(roots) != 1 or roots[0].numel() != 1:
        memory.log.add("backward", terms=[], loss_at=None)
        return
    try:
        with unseen():
            terms = list(terms_of(roots[0]))
    except (RuntimeError, AttributeError):  # buffers that are freed already
        terms = []
    memory.log.add("backward", terms=terms, loss_at=memory.loss_at)
    memory.loss_at = None


def terms_of(loss: Tensor) -> Iterator[Term]:
    """Return the terms that a loss is a sum of."""
    if loss.grad_fn is not None:
        yield from _walk(loss.grad_fn, 1.0, 1.0, 0)


def _walk(node: Any, factor: float, over: float, depth: int) -> Iterator[Term]:
    name = node.name()
    following = [f for f, _ in node.next_functions if f is not None]
    if name in _NLL or name in _ELEMENTWISE:
        yield from _reduced(node, name, factor)
        return
    if name in ("MeanBackward0", "SumBackward0"):
        sizes = node._saved_self_sym_sizes
        if sizes:  # else it is of one number, and changes nothing
            count = math.prod(int(size) for size in sizes)
            if name == "MeanBackward0":
                yield factor / max(count, 1), count
            else:
                yield factor, over if 1 < over <= count else count
            return
    elif name not in _ADDING:
        scale = _scale(node, name, following)
        factor *= scale
        whole = round(1 / scale) if scale else 0
        if name == "DivBackward0" and math.isclose(whole * scale, 1.0):
            over = max(over, whole)
    if factor and depth < _FAR:
        for each in following:
            yield from _walk(each, factor, over, depth + 1)


def _scale(node: Any, name: str, following: list[Any]) -> float:
    """Return by how much an operation with one number scales, 0 if it isn't one."""
    if name in _THROUGH:
        return 1.0
    if name == "NegBackward0":
        return -1.0
    number = _number(node) if len(following) == 1 else 0.0
    if name == "MulBackward0":
        return number
    return 1 / number if name == "DivBackward0" and number else 0.0


def _reduced(node: Any, name: str, factor: float) -> Iterator[Term]:
    if node._saved_reduction not in (MEAN, SUM):
        return
    if name in _NLL:
        if node._saved_weight is not None:
            return
        ignored = _signed(node._saved_ignore_index)
        count = int((node._saved_target != ignored).sum())
    else:
        count = node._saved_self.numel()
    yield factor / max(count, 1) if node._saved_reduction == MEAN else factor, count


def _number(node: Any) -> float:
    """Return the one number that a product or a division has beside the loss, or 0."""
    for side in ("_saved_other", "_saved_self"):
        value = getattr(node, side, None)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return float(value)
    return 0.0


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
