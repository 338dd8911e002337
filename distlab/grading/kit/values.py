"""Comparing what ranks hold with what they should hold, and naming the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence

SINGLE = 1e-5
"""Relative error that float32 on the way may leave; a wrong formula leaves more."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """What a known misconception would leave on the ranks, and its sentence."""

    slug: str
    values: Sequence[Tensor]
    sentence: str
    rule: str = ""


def close(actual: object, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether `actual` is a tensor of the right shape with those values.

    The tolerance is relative to the largest expected value, as rounding errors are.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return False
    if expected.numel() == 0:
        return True
    wide_actual, wide = actual.to(torch.float64), expected.to(torch.float64)
    scale = max(1.0, float(wide.abs().max()))
    return bool((wide_actual - wide).abs().max() <= tolerance * scale)


def all_close(
    actual: Sequence[object], expected: Sequence[Tensor], tolerance: float = 1e-10
) -> bool:
    """Whether every rank's value is close to its expected one."""
    return all(close(a, e, tolerance) for a, e in zip(actual, expected, strict=True))


def expect_values(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    what: str,
    verb: str = "is",
    suspects: Sequence[Suspect] | Callable[[], Sequence[Suspect]] = (),
    tolerance: float = 1e-10,
    rule: str = "",
) -> None:
    """Rank by rank, `actual` must be close to `expected`.

    What makes the suspects is called only if something is wrong. `rule` is for those
    that have none of their own: where no suspect fits, there are facts and no rule.

    Raises:
        NotYetError: it is not; named after the suspect whose values fit every rank,
            if exactly those of one do.
    """
    if all_close(actual, expected, tolerance):
        return
    wrong = [
        rank
        for rank, (a, e) in enumerate(zip(actual, expected, strict=True))
        if not close(a, e, tolerance)
    ]
    evidence = tuple(
        Evidence(
            rank=rank,
            state="wrong" if rank in wrong else "right",
            text=_beside(a, e, tolerance),
        )
        for rank, (a, e) in enumerate(zip(actual, expected, strict=True))
    )
    for suspect in suspects() if callable(suspects) else suspects:
        told_apart = not all_close(suspect.values, expected, tolerance)
        if told_apart and all_close(actual, suspect.values, tolerance):
            raise NotYetError(
                suspect.sentence,
                slug=suspect.slug,
                evidence=evidence,
                rule=suspect.rule or rule,
            )
    if tolerance < SINGLE and all_close(actual, expected, SINGLE):
        digits = 10  # fewer would look alike
        raise NotYetError(
            f"{what} {verb} right to about 7 digits only: float64 became float32 on "
            "the way",
            slug="wrong-dtype",
            evidence=tuple(
                replace(
                    line, text=f"got {brief(a, digits)}   expected {brief(e, digits)}"
                )
                for line, a, e in zip(evidence, actual, expected, strict=True)
            ),
            rule="take the dtype from what you are given: torch.empty_like(t), "
            "dtype=t.dtype",
        )
    numbers = ", ".join(map(str, wrong))
    on = f"on rank {numbers}" if len(wrong) == 1 else f"on ranks {numbers}"
    raise NotYetError(f"{what} {verb} wrong {on}", evidence=evidence)


def _beside(actual: object, expected: Tensor, tolerance: float) -> str:
    """Both in short; if they begin alike, the first element that is wrong."""
    got, wanted = brief(actual), brief(expected)
    if got != wanted or close(actual, expected, tolerance):
        return f"got {got}   expected {wanted}"
    assert isinstance(actual, Tensor)
    if actual.shape != expected.shape:
        shapes = list(actual.shape), list(expected.shape)
        return f"got {got} of shape {shapes[0]}   expected shape {shapes[1]}"
    a, e = (
        tensor.detach().flatten().to(torch.float64) for tensor in (actual, expected)
    )
    wrong = ~((a - e).abs() <= tolerance * max(1.0, float(e.abs().max())))
    index = int(wrong.nonzero()[0])
    return f"element {index} of {len(e)}: got {a[index]:.6g}   expected {e[index]:.6g}"


def expect_equal_bits(
    values: Sequence[Tensor], *, what: str, slug: str = "", rule: str = ""
) -> None:
    """All ranks must hold the very same bits.

    Raises:
        NotYetError: they do not.
    """
    odd = [rank for rank, v in enumerate(values) if not torch.equal(v, values[0])]
    if not odd:
        return
    evidence = tuple(
        Evidence(rank=rank, state="digest", text=digest(value))
        for rank, value in enumerate(values)
    )
    raise NotYetError(
        f"{what} is right on every rank up to rounding, but not the same bits",
        slug=slug,
        evidence=evidence,
        rule=rule,
    )


def brief(value: object, digits: int = 4) -> str:
    """A tensor in a few characters: its first three numbers."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().reshape(-1)
    numbers = ", ".join(f"{number:.{digits}g}" for number in flat[:3].tolist())
    return f"[{numbers}{', …' if flat.numel() > 3 else ''}]"


def digest(*tensors: Tensor) -> str:
    """Eight hex digits that are equal exactly when all the bits are."""
    import hashlib

    hasher = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(plain.numpy().tobytes())
    return hasher.hexdigest()[:8]


def same_everywhere(value: Tensor, world_size: int) -> list[Tensor]:
    """The same expected value on each of the ranks."""
    return [value] * world_size
