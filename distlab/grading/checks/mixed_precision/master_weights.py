"""Checks of task 2.6, `mixed_precision.master_weights`: up, step, down, and how wide.

What ranks did is in master_weights_runs.py; the step itself is the check's own, so
that each of the three functions is judged by what it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.mixed_precision.infinite import finite
from distlab.grading.checks.mixed_precision.master_weights_runs import (
    STEPS,
    TINY,
    tiny_updates,
    up_step_down,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    SINGLE,
    Suspect,
    all_close,
    brief,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

WORLDS = (3, 2, 4, 5, 1)
HALF_WORLD = 2  # where float16 is tried as well
NARROW = 2.0**-5
"""Relative error that a few sums in 16 bits may leave; a wrong formula leaves more."""


def _half(world_size: int) -> list[RunSpec]:
    half = on_ranks(up_step_down, dtype="float16").when("with a float16 model")
    return [on_ranks(up_step_down), *[half] * (world_size == HALF_WORLD)]


def _count(world_size: int) -> int:
    return 1000 if world_size == 1 else 40


def _tiny(world_size: int) -> list[RunSpec]:
    tiny = on_ranks(tiny_updates, count=_count(world_size))
    return [tiny, on_ranks(up_step_down)]


# ── C1: the copies ──────────────────────────────────────────────────────────────────


@clause("mixed_precision.master_weights", "C1", worlds=(1, 3), runs=_tiny)
def tiny_updates_add_up(runs: Runs) -> str | None:
    """The copies are the model's values, and catch what 16 bits would lose."""
    run, count = runs.finished(_tiny(runs.world_size)[0]), _count(runs.world_size)
    for value in run.values:
        _expect_copies(value)
    start = run.values[0]["start"]
    after = [value["copies"] for value in run.values]
    n = len(after)
    narrow = sorted(set(run.values[0]["dtypes"]) - {"float32"})
    why = (
        f"it is {narrow[0]}, expected float32"
        if narrow
        else "it was rounded to the model's 16 bits in each step"
    )
    expect_values(
        after,
        same_everywhere(start + count * TINY, n),
        what=f"after {count} updates of {TINY}, the master",
        tolerance=1e-4,
        suspects=[
            Suspect(
                slug="tiny-updates-vanish",
                values=same_everywhere(start, n),
                sentence=f"after {count} updates of {TINY}, the master is unchanged: "
                f"{why}",
                rule="only the model is rounded; the master is float32, and never "
                "filled from the model",
            ),
        ],
    )
    if narrow:
        raise NotYetError(
            f"the master is {narrow[0]}, expected float32",
            rule="4 bytes per weight: fewer lose small updates, more are not needed",
        )
    shared = run.values[0]["shared"]
    if shared:
        raise NotYetError(
            f"the master of `{shared}`, a float32 parameter, shares the memory of the "
            "parameter, expected a copy",
            slug="nothing-copied",
            rule=".float() does not copy a float32 tensor: .to(…, copy=True) does",
        )
    wanted, found = run.values[0]["counts"]
    if found != wanted:
        raise NotYetError(
            "for a model in which two modules share a parameter, master_copy returned "
            f"{found} masters, expected {wanted}",
            rule="model.parameters() has a shared parameter once",
        )
    _expect_not_filled(runs.ended(up_step_down))
    if runs.world_size > 1:
        return None
    total = float(after[0][0] - start[0])
    return f"{count} updates of {TINY} add up to {total:.4f}"


def _expect_not_filled(run: Run) -> None:
    """Where the steps came to their end; if not, C2 says why."""
    if run.outcome != "finished":
        return
    for rank, value in enumerate(run.values):
        for step, up in enumerate(value["up"]):
            name, is_model = up["changed"]
            if name:
                does = f"changed the master of `{name}`"
                if is_model:
                    does = f"filled the master of `{name}` with the model's values"
                raise NotYetError(
                    f"in step {step + 1} on rank {rank}, gradients_to_master {does}, "
                    "expected only the master's .grad to change",
                    slug="tiny-updates-vanish" if is_model else "",
                    rule="the master is never filled from the model" * is_model,
                )


def _expect_copies(value: dict[str, Any]) -> None:
    if value["odd"]:
        raise NotYetError(
            f"master_copy returned {value['odd']}, expected a list of parameters",
            rule="one float32 copy for each parameter that is trained",
            fatal=True,
        )
    if value["shapes"] != value["expected_shapes"]:
        raise NotYetError(
            _wrong_shapes(value["shapes"], value["expected_shapes"]),
            rule="one copy for each parameter that needs a gradient, in the model's "
            "order",
            fatal=True,
        )
    if not torch.equal(value["first"], value["start"]):
        raise NotYetError(
            f"the master starts at {brief(value['first'], 3)}, expected the model's "
            f"values, {brief(value['start'], 3)}",
            rule="a master starts with the values of its parameter",
            fatal=True,
        )
    if value["followed"]:
        raise NotYetError(
            "the master isn't a leaf tensor, so no optimizer accepts it: expected a "
            "new parameter",
            rule="copy without history: p.detach(), then a new nn.Parameter",
            fatal=True,
        )


def _wrong_shapes(found: list[Any], expected: list[Any]) -> str:
    if len(found) != len(expected):
        return (
            f"master_copy returned {len(found)} tensors, expected one for each of the "
            f"{len(expected)} trained parameters"
        )
    pairs = enumerate(zip(found, expected, strict=True))
    place, (got, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return (
        f"master {place} that master_copy returned has shape {list(got)}, expected "
        f"{list(right)}, in the model's order"
    )


# ── C2: up ──────────────────────────────────────────────────────────────────────────


@clause("mixed_precision.master_weights", "C2", worlds=WORLDS, runs=_half)
def mean_in_float32(runs: Runs) -> str | None:
    """The mean gradient, summed wide; nothing left for the next step."""
    for spec in _half(runs.world_size):
        _expect_wide_means(runs.finished(spec))
    return None


def _expect_wide_means(run: Run) -> None:
    for step in range(STEPS):
        ups = [value["up"][step] for value in run.values]
        _expect_mean(run, ups, step)
        _expect_none_left(ups)
    expect_messages(run, "the gradients are right, but not through comm")
    calls = [call for record in run.ranks for call in record.calls()]
    if any(str(call["dtype"]) == "float64" for call in calls):
        raise NotYetError(
            "the gradients are sent as float64, expected float32, half as many bytes",
            rule="cast to float32: a sum over a few ranks needs no more precision",
        )


def _expect_mean(run: Run, ups: list[dict[str, Any]], step: int) -> None:
    """`own` and `up` map each trained parameter's name to its gradient, or None."""
    for rank, up in enumerate(ups):
        for name, own in up["own"].items():
            found = up["up"][name]
            if own is not None and found is None:
                raise NotYetError(
                    f"after gradients_to_master on rank {rank}, the master of `{name}` "
                    "has no gradient, expected the mean",
                    rule="put the mean into the master's .grad, for every parameter "
                    "that has a gradient",
                )
            if own is None and found is not None and found.any():
                raise NotYetError(
                    f"in step {step + 1}, parameter `{name}` has no gradient, but its "
                    f"master's .grad is {brief(found, 3)}, expected None or zeros",
                    rule="set the gradient of such a master to None or zeros: the "
                    "optimizer would apply the old gradient again",
                )
    ups = finite(ups, step)
    own = [_flat(up["own"], up["own"]) for up in ups]
    found = [_flat(up["up"], up["own"]) for up in ups]
    mean = torch.stack(own).mean(0)
    if not all_close(found, same_everywhere(mean, len(own)), SINGLE):
        _expect_wide(run, own, found, mean)
        _expect_each(run, ups)
    expect_equal_bits(
        found,
        what="the master's gradient",
        rule="every rank must use the same sum",
    )


def _expect_each(run: Run, ups: list[dict[str, Any]]) -> None:
    """Of those that are wrong, all at once if all are."""
    names = [name for name, own in ups[0]["own"].items() if own is not None]
    wrong = [name for name in names if not _is_mean(ups, name)]
    own, found = (
        [torch.cat([up[key][name].reshape(-1) for name in wrong]) for up in ups]
        for key in ("own", "up")
    )
    mean = torch.stack(own).mean(0)
    of = f" of `{'`, `'.join(wrong)}`" if wrong != names else ""
    dtypes = run.values[0]["dtypes"]
    shared = all(dtypes[name] == "float32" for name in wrong)
    expect_values(
        found,
        same_everywhere(mean, len(own)),
        what=f"the master's gradient{of}",
        tolerance=SINGLE,
        suspects=_wrong_means(own, of, shared),
        rule="the mean over the ranks: sum, then divide by comm.world_size",
    )


def _is_mean(ups: list[dict[str, Any]], name: str) -> bool:
    mean = torch.stack([up["own"][name] for up in ups]).mean(0)
    found = [up["up"][name] for up in ups]
    return all_close(found, same_everywhere(mean, len(ups)), SINGLE)


def _expect_wide(
    run: Run, own: list[Tensor], found: list[Tensor], mean: Tensor
) -> None:
    """Right up to what 16 bits can hold, and no further."""
    largest = max(float(gradient.abs().max()) for gradient in own)
    worst = max(float((f - mean).abs().max()) for f in found)
    if not worst <= NARROW * largest or run.world_size == 1:
        return
    calls = [call for record in run.ranks for call in record.calls()]
    narrow = sorted({str(c["dtype"]) for c in calls} & {"bfloat16", "float16"})
    how = f"it was sent as {narrow[0]}" if narrow else "it was rounded to 16 bits"
    raise NotYetError(
        f"the mean gradient is accurate to only about two digits: {how}, expected "
        "float32",
        slug="summed-in-16-bits",
        rule="first cast the gradient to float32, then sum it over the ranks",
    )


def _wrong_means(own: list[Tensor], of: str, is_wide: bool) -> list[Suspect]:
    """`of` names parameters, if not all are meant; `is_wide`: they are float32."""
    zero = f"the master's gradient{of} is zero"
    rule = "cast it before you clear the model's"
    if is_wide:
        zero += ": it shares the memory of the model's, which was cleared"
        rule = (
            ".float() does not copy a float32 tensor: zero_() clears both, .grad = "
            "None drops one reference"
        )
    return [
        Suspect(
            slug="own-gradient-only",
            values=own,
            sentence="each rank's master has that rank's own gradient, expected the "
            "mean over the ranks",
            rule="all-reduce the tensor that becomes the master's gradient",
        ),
        Suspect(
            slug="",
            values=[torch.zeros_like(one) for one in own],
            sentence=zero,
            rule=rule,
        ),
    ]


def _expect_none_left(ups: list[dict[str, Any]]) -> None:
    for rank, up in enumerate(ups):
        if up["left"]:
            raise NotYetError(
                f"after gradients_to_master on rank {rank}, the model's parameter "
                f"`{up['left']}` still has a gradient, expected None",
                slug="gradients-not-zeroed",
                rule="backward() adds to .grad: set the model's to None after you have "
                "used it",
            )


def _flat(state: dict[str, Tensor | None], own: dict[str, Tensor | None]) -> Tensor:
    """End to end, of those that have a gradient."""
    parts = [state[name] for name, gradient in own.items() if gradient is not None]
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


# ── C3: down ────────────────────────────────────────────────────────────────────────


@clause("mixed_precision.master_weights", "C3", worlds=WORLDS, runs=_half)
def model_is_the_master_rounded(runs: Runs) -> str | None:
    """Same parameters, same dtypes, the master's values rounded."""
    _expect_rounded(runs.finished(up_step_down))
    if runs.world_size == HALF_WORLD:
        _expect_rounded(runs.finished(up_step_down, dtype="float16"))
    return None


def _expect_rounded(run: Run) -> None:
    for step in range(STEPS):
        for rank, value in enumerate(run.values):
            down = value["down"][step]
            if down["replaced"]:
                raise NotYetError(
                    "after master_to_model, parameter "
                    f"`{down['replaced']}` of the model is a new object, expected the "
                    "old object with new values",
                    rule="write into the existing parameters",
                )
            _expect_dtypes(down["dtypes"], value["dtypes"], rank)
            _expect_model(down, step, rank)
            if down["shared"]:
                raise NotYetError(
                    f"after master_to_model, parameter `{down['shared']}` of the model "
                    "shares its master's memory, expected a copy of the values",
                    slug="nothing-copied",
                    rule=".to(dtype) does not copy a float32 tensor: "
                    "parameter.copy_(master) does",
                )


def _expect_dtypes(found: dict[str, str], before: dict[str, str], rank: int) -> None:
    for name, dtype in before.items():
        if found[name] != dtype:
            widened = dtype in ("bfloat16", "float16") and found[name] == "float32"
            raise NotYetError(
                f"after master_to_model on rank {rank}, parameter `{name}` of the "
                f"model is {found[name]}, expected {dtype} as before",
                slug="model-widened" if widened else "",
                rule="change the values, not the dtype: copy_ rounds to the dtype of "
                "the destination",
            )


def _expect_model(down: dict[str, Any], step: int, rank: int) -> None:
    for name, expected in down["expected"].items():
        found = down["model"][name]
        if torch.equal(found, expected):
            continue
        was = down["before"][name]
        slug = sentence = ""
        if torch.equal(found, was):
            slug = "model-not-updated"
            sentence = (
                f"after step {step + 1}, parameter `{name}` of the model is unchanged, "
                "expected its master's value, rounded"
            )
        text = f"got {brief(found)}   expected {brief(expected)}"
        raise NotYetError(
            sentence
            or f"after step {step + 1}, parameter `{name}` of the model is "
            f"{brief(found)}, expected its master's rounded value, {brief(expected)}",
            slug=slug,
            evidence=[(rank, "wrong", text)],
            rule="after each step copy every master into its parameter",
        )
