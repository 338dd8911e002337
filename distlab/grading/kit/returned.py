"""Numbers that a learner's function returned: a float, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading.kit.values import Suspect, close, expect_values, same_everywhere
from distlab.grading.verdict import NotYetError

_NARROW = (
    (7, 32, (torch.float32,)),
    (3, 16, (torch.float16, torch.bfloat16)),
)
"""How many digits are left, in how many bits, of which dtypes."""


def number_of(value: Any) -> float | str:
    """`value` if it is a number of Python, else the name of its type."""
    return float(value) if isinstance(value, int | float) else type(value).__name__


def expect_float(returned: list[Any], sentence: str) -> None:
    """Each of these is a number, as `number_of` recorded it.

    `sentence` has a gap for what was returned instead.

    Raises:
        NotYetError: one is not.
    """
    for value in returned:
        if value == "Tensor":
            raise NotYetError(
                sentence.format("a tensor") + "; expected a float",
                slug="not-a-float",
                rule="convert it at the end, on every rank: float(tensor)",
            )
        if isinstance(value, str):
            kind = "nothing" if value == "NoneType" else f"a {value}"
            raise NotYetError(
                sentence.format(kind) + "; expected a float",
                slug="returned-none",
                rule="return a float, on every rank",
            )


def expect_loss(
    losses: list[float | None],
    expected: Tensor,
    what: str = "the returned loss",
    guesses: Callable[[], Sequence[tuple[str, float]]] = tuple,
) -> None:
    """What each rank returned must be the loss of the batch.

    `guesses` gives other losses, with what a rank returns then, in words.

    Raises:
        NotYetError: it is not.
    """
    n = len(losses)
    told = [
        torch.tensor(torch.nan if loss is None else loss, dtype=torch.float64)
        for loss in losses
    ]
    right = [close(number, expected) for number in told]
    if all(right):
        return
    _expect_all_digits(told, right, expected)
    if right[-1] and n > 1 and not any(right[:-1]):
        does = "returned nothing" if losses[0] is None else f"returned {losses[0]:.3g}"
        raise NotYetError(
            f"only the last stage returned the loss, {float(expected):.3g}: rank 0 "
            f"{does}, expected the loss on every rank",
            slug="loss-on-last-stage-only",
            rule="comm.broadcast the loss from the last rank",
        )
    if all(loss is None for loss in losses):
        raise NotYetError(
            "no rank returned a number, expected the loss as a float on every rank",
            slug="returned-none",
            rule="return the loss as a float, on every rank",
        )
    expect_values(
        told,
        same_everywhere(expected, n),
        what=what,
        suspects=lambda: [
            Suspect(
                slug="",
                values=same_everywhere(torch.tensor(guess, dtype=expected.dtype), n),
                sentence=f"{what} is {words}",
            )
            for words, guess in guesses()
        ],
    )


def _expect_all_digits(told: list[Tensor], right: list[bool], expected: Tensor) -> None:
    """A loss that is near, and fits into fewer bits, has been in a tensor of these."""
    wrong = [rank for rank, is_right in enumerate(right) if not is_right]
    for digits, bits, dtypes in _NARROW:
        near = all(close(told[rank], expected, 10.0 ** (1 - digits)) for rank in wrong)
        fits = any(
            all(
                torch.equal(told[rank], told[rank].to(dtype).double()) for rank in wrong
            )
            for dtype in dtypes
        )
        if near and fits:
            wanted = f"expected {float(expected):.10g}"
            raise NotYetError(
                f"the returned loss has only about {digits} right digits because it "
                f"passed through a {bits}-bit tensor, expected all digits",
                slug="wrong-dtype",
                evidence=[
                    (
                        rank,
                        "wrong" if rank in wrong else "right",
                        f"got {float(number):.10g}   {wanted}",
                    )
                    for rank, number in enumerate(told)
                ],
                rule="torch.zeros(1) is float32: send the loss in a tensor with "
                "dtype=torch.float64",
            )
