"""Comparing what ranks hold with what they should hold, and naming the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from distlab.digests import digest
from distlab.grading.kit.apart import apart
from distlab.grading.kit.contributions import what_is_missing
from distlab.grading.kit.flat import flat
from distlab.grading.verdict import Difference, NotYetError
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.terminal import ranks_in_words

_NEAR = 1e-6  # a factor that is nearer to a whole number is that number
SINGLE = 1e-5
"""Relative error that float32 on the way may leave; a wrong formula leaves more."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """What a known misconception would leave on the ranks, and its sentence."""

    slug: str
    values: Sequence[Tensor]
    sentence: str
    rule: str = ""
    tolerance: float = 1e-10  # wider where the mistake makes rounding errors grow


def close(actual: object, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether `actual` is a tensor of the right shape with those values.

    The tolerance is relative to the largest expected value, as rounding errors are.
    Where inf or nan is expected, only the same is close.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return False
    if expected.numel() == 0:
        return True
    wide_actual, wide = actual.to(torch.float64), expected.to(torch.float64)
    return torch.allclose(
        wide_actual, wide, rtol=0.0, atol=tolerance * _scale(wide), equal_nan=True
    )


def _scale(expected: Tensor) -> float:
    """What an error is relative to: the largest finite number, or 1."""
    return max(1.0, float(expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max()))


def all_close(
    actual: Sequence[object], expected: Sequence[Tensor], tolerance: float = 1e-10
) -> bool:
    """Whether every rank's value is close to its expected one."""
    return all(close(a, e, tolerance) for a, e in zip(actual, expected, strict=True))


def expect_values(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    what: str | Callable[[], str],
    verb: str = "is",
    suspects: Iterable[Suspect] | Callable[[], Iterable[Suspect]] = (),
    tolerance: float = 1e-10,
    rule: str = "",
    parts: Sequence[Tensor] = (),
) -> None:
    """Rank by rank, `actual` must be close to `expected`.

    If the expected values are sums or means over the ranks, `parts` has what each rank
    adds; then the verdict says whose part is missing. What makes the suspects or the
    text `what` is called only if something is wrong. `rule` is said with a suspect that
    has none of its own: where no suspect fits, the verdict has no rule.

    Raises:
        NotYetError: it is not; named after the first suspect whose values fit every
            rank and are not the expected ones, if there is one.
    """
    if all_close(actual, expected, tolerance):
        return
    wrong = [
        rank
        for rank, (a, e) in enumerate(zip(actual, expected, strict=True))
        if not close(a, e, tolerance)
    ]
    evidence = tuple(
        Evidence(rank, "wrong" if rank in wrong else "right", _beside(a, e, tolerance))
        for rank, (a, e) in enumerate(zip(actual, expected, strict=True))
    )
    evidence += _put_there(expected, evidence)
    for suspect in suspects() if callable(suspects) else suspects:
        wide = max(tolerance, suspect.tolerance)
        told_apart = not all_close(suspect.values, expected, wide)
        if told_apart and all_close(actual, suspect.values, wide):
            raise NotYetError(
                suspect.sentence,
                slug=suspect.slug,
                evidence=evidence,
                rule=suspect.rule or rule,
            )
    told = what() if callable(what) else what
    if tolerance < SINGLE and all_close(actual, expected, SINGLE):
        raise _right_to_some_digits(f"{told} {verb}", actual, expected, evidence)
    raise NotYetError(
        f"{told} {verb} {_fact(actual, expected, wrong, tolerance, parts)}",
        evidence=evidence,
        difference=Difference(what=told, actual=tuple(actual), tolerance=tolerance),
    )


def _fact(
    actual: Sequence[object],
    expected: Sequence[Tensor],
    wrong: Sequence[int],
    tolerance: float,
    parts: Sequence[Tensor],
) -> str:
    """State what can be seen of wrong values, whatever the reason."""
    is_all = 1 < len(wrong) == len(expected)
    on = "on every rank" if is_all else f"on {ranks_in_words(wrong)}"
    factor = _factor([actual[r] for r in wrong], [expected[r] for r in wrong])
    if factor is not None:
        return f"{factor} {on}"
    first = wrong[0]
    for rank, other in enumerate(expected):
        if rank != first and close(actual[first], other, tolerance):
            return f"wrong {on}: rank {first} has what rank {rank} should have"
    if parts:
        for rank, part in enumerate(parts):
            if close(actual[first], part, tolerance):
                whose = "its own" if rank == first else f"rank {rank}'s"
                return f"wrong {on}: rank {first} has only {whose} contribution"
        if missing := what_is_missing(actual[first], expected[first], parts):
            return f"wrong {on}: rank {first} {missing}"
        if some := _own_in_some(
            actual[first], expected[first], parts[first], tolerance
        ):
            return f"wrong {on}: rank {first} has only its own contribution in {some}"
    few, there = _where(first, actual[first], expected[first], tolerance)
    return f"wrong {few}{on}{there}"


def _own_in_some(
    actual: object, expected: Tensor, own: Tensor, tolerance: float
) -> str | None:
    """Say in how many elements a rank has what it has added itself, if in all wrong."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return None
    if own.shape != expected.shape:
        return None
    got, wanted, part = (t.double().reshape(-1) for t in (actual, expected, own))
    off = _errors(got, wanted) > tolerance * _scale(expected)
    if not off.any() or not close(got[off], part[off], tolerance):
        return None
    return f"{int(off.sum())} of {len(off)} elements"


def _factor(actual: Sequence[object], expected: Sequence[Tensor]) -> str | None:
    """Say so if all values are the same multiple of the expected ones."""
    for a, e in zip(actual, expected, strict=True):
        if not isinstance(a, Tensor) or a.shape != e.shape or not e.numel():
            return None
    got, wanted = (
        flat(tensor.double() for tensor in tensors)
        for tensors in (cast("Sequence[Tensor]", actual), expected)
    )
    finite = got.isfinite() & wanted.isfinite()
    if not _equal(got[~finite], wanted[~finite]):
        return None
    got, wanted = got[finite], wanted[finite]
    size = float(wanted.square().sum())
    if not 0 < size < math.inf:
        return None
    factor = float((got * wanted).sum()) / size
    if not close(got, factor * wanted):
        return None
    if not factor or got.abs().max() < _NEAR * size**0.5:
        return "zero"
    for number, said in ((factor, "{} times"), (1 / factor, "1/{} of")):
        if abs(number - round(number)) < _NEAR and abs(number) >= 1:
            return f"{said.format(round(number))} the expected value"
    if len(wanted.unique()) == 1:
        return None  # every number is some multiple of another
    return f"{factor:.3g} times the expected value"


def _where(
    rank: int, actual: object, expected: Tensor, tolerance: float
) -> tuple[str, str]:
    """Say in how many elements it is wrong, if in few, and what the first one is."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return "", ""
    got, wanted = actual.double().reshape(-1), expected.double().reshape(-1)
    errors = _errors(got, wanted)
    off = (errors > tolerance * _scale(expected)).nonzero().reshape(-1)
    if not len(off):
        return "", ""
    at, few = int(off[0]), ""
    if len(off) <= len(errors) // 2:
        few = f"in {len(off)} of {len(errors)} elements "
    element = f"element {at} is " * (len(errors) > 1)
    pair = apart(float(got[at]), float(wanted[at]))
    return few, f": {element}{pair[0]} on rank {rank}, expected {pair[1]}"


def _put_there(
    expected: Sequence[Tensor], evidence: Sequence[Evidence]
) -> tuple[Evidence, ...]:
    """A line on an inf or nan that the evidence shows and the check expects."""
    shown = " ".join(line.text for line in evidence)
    kinds = {
        "inf": any(bool(e.isinf().any()) for e in expected),
        "nan": any(bool(e.isnan().any()) for e in expected),
    }
    found = [name for name, there in kinds.items() if there and name in shown]
    if not found:
        return ()
    text = f"the check put {' and '.join(found)} into a rank's data: expected to stay"
    return (Evidence(NOBODY, "given", text),)


def _right_to_some_digits(
    what: str,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    evidence: Sequence[Evidence],
) -> NotYetError:
    digits = 10  # fewer would look alike
    shown = NotYetError(
        f"{what} accurate to only about {_digits(actual, expected)} digits",
        evidence=tuple(
            replace(line, text=largest_error(a, e, digits))
            for line, a, e in zip(evidence, actual, expected, strict=False)
        ),
    )
    if not all(map(_is_single, actual)):
        return shown  # a small number was added somewhere, or some other formula used
    return shown.but(
        message=f"{shown.message}: float64 was converted to float32 along the way",
        slug="wrong-dtype",
        rule="take the dtype from what you are given: torch.empty_like(t), "
        "dtype=t.dtype",
    )


def _is_single(value: Tensor) -> bool:
    """Whether float32 can hold every number of it."""
    return torch.equal(value.double(), value.float().double())


def _digits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many leading digits agree, of the largest number."""
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e.numel()]
    off = max(float(_errors(a.double(), e.double()).max()) for a, e in pairs)
    return int(math.log10(max(_scale(e) for _, e in pairs) / off))


def _beside(actual: object, expected: Tensor, tolerance: float) -> str:
    """Both in short; if they begin alike, the element with the largest error."""
    got, wanted = brief(actual), brief(expected)
    if got != wanted or close(actual, expected, tolerance):
        return f"got {got}   expected {wanted}"
    assert isinstance(actual, Tensor)
    if actual.shape != expected.shape:
        shapes = list(actual.shape), list(expected.shape)
        return f"got {got} of shape {shapes[0]}   expected shape {shapes[1]}"
    return largest_error(actual, expected)


def largest_error(actual: Tensor, expected: Tensor, digits: int = 6) -> str:
    """The element that is farthest from its expected value, or nan, and that value."""
    a, e = (
        tensor.detach().flatten().to(torch.float64) for tensor in (actual, expected)
    )
    if not len(e):
        return "no elements"
    index = int(_errors(a, e).argmax())
    got, wanted = f"{a[index]:.{digits}g}", f"{e[index]:.{digits}g}"
    where = f"element {index} of {len(e)}: " if len(e) > 1 else ""
    return f"{where}got {got}   expected {wanted}"


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Of each element, 0 where inf or nan is expected and is there, else inf."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = (actual - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return off.masked_fill(same, 0.0)


def expect_equal_bits(
    values: Sequence[Tensor],
    *,
    what: str,
    verb: str = "is",
    slug: str = "",
    rule: str = "",
) -> None:
    """All ranks must hold the very same bits; one nan is like another.

    Raises:
        NotYetError: they do not.
    """
    odd = [rank for rank, v in enumerate(values) if not _equal(v, values[0])]
    if not odd:
        return
    evidence = tuple(
        Evidence(rank, "digest", digest(value)) for rank, value in enumerate(values)
    )
    raise NotYetError(
        f"{what} {verb} right, but the ranks differ by rounding errors, expected the "
        "same bits on every rank",
        slug=slug,
        evidence=evidence,
        rule=rule,
    )


def _equal(value: Tensor, other: Tensor) -> bool:
    """As torch.equal, where nan is equal to nan."""
    nans = value.isnan(), other.isnan()
    alike = torch.equal(*nans)
    filled = value.masked_fill(nans[0], 0), other.masked_fill(nans[1], 0)
    return alike and torch.equal(*filled)


def brief(value: object, digits: int = 4) -> str:
    """A tensor in a few characters: its first three numbers."""
    if not isinstance(value, Tensor):
        return repr(value)
    row = value.detach().reshape(-1)
    numbers = ", ".join(f"{number:.{digits}g}" for number in row[:3].tolist())
    return f"[{numbers}{', …' if row.numel() > 3 else ''}]"


def same_everywhere(value: Tensor, world_size: int) -> list[Tensor]:
    """The same expected value on each of the ranks."""
    return [value] * world_size
