"""Tensors by name, as a model has them: which ones are not what they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from distlab.grading.kit.values import all_close

State = dict[str, Tensor]
"""A model's parameters, buffers or gradients by name, in float64."""


def listed(names: list[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def wrong_names(expected: State, actual: list[State]) -> list[str]:
    """What is not as expected on every rank."""
    return [
        name
        for name, value in expected.items()
        if not all_close([state[name] for state in actual], [value] * len(actual))
    ]


def some_of(what: str, expected: State, actual: list[State]) -> str:
    """`what`, with the names of the wrong ones if others are right."""
    wrong = wrong_names(expected, actual)
    if not wrong or len(wrong) == len(expected):
        return what
    return f"{what} ({listed(wrong)})"


def of_parameter(
    what: str,
    make_model: Callable[[], nn.Module],
    actual: Sequence[Tensor],
    expected: Tensor,
    tolerance: float = 1e-10,
) -> str:
    """`what`, and of which parameter if not all of them are wrong, and its kind.

    Each tensor is flat: what the ranks have for all of the model's parameters, or for
    all that require a gradient.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in make_model().named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    if sum(parameter.numel() for parameter in names) != expected.numel():
        names = {p: own for p, own in names.items() if p.requires_grad}
    sizes = [parameter.numel() for parameter in names]
    if any(one.shape != expected.shape for one in actual) or (
        sum(sizes) != expected.numel()
    ):
        return what
    pieces = zip(expected.split(sizes), *(a.split(sizes) for a in actual), strict=True)
    wrong = [
        parameter
        for parameter, (right, *found) in zip(names, pieces, strict=True)
        if not all_close(found, [right] * len(found), tolerance)
    ]
    if not wrong or len(wrong) > len(names) // 2:
        return what
    first = wrong[0]
    return f"{what} of {_described(first, names[first])}"


def _described(parameter: nn.Parameter, names: Sequence[str]) -> str:
    """Its name, and what sets it apart from ordinary parameters."""
    kinds = []
    if not parameter.requires_grad:
        kinds.append("is frozen")
    if len(names) > 1:
        kinds.append(f"is also {names[1]}")
    if not parameter.is_contiguous():
        kinds.append("is a transposed view")
    return f"{names[0]}, which {' and '.join(kinds)}," if kinds else names[0]
