"""Tensors by name, as a model has them: which ones are not what they should be."""

from __future__ import annotations

from torch import Tensor

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
