"""Checks of task 2.24, `mixed_precision.port`: autocast, and one decision for all.

Every rank has a model of its own. Its inputs and targets are eighths of small
integers, so that bfloat16 holds each gradient exactly and a wrong factor shows.

    step      0     1     2     3    4    5    6     7
    overflow                    nan  inf
    S         1024        2048       1024 512        1024
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import listed
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.plain_sgd import CountedSGD
from distlab.grading.kit.torch_group import WORLDS, finished, join
from distlab.grading.kit.values import Suspect, expect_values
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import ranks_in_words

STEPS, CALM = 8, 3  # the first overflow comes after the calm ones
INIT_SCALE, INTERVAL = 1024.0, 2
LEARNING_RATE = 0.5
LOOSE = 1e-6
SHARED = "one all_reduce per step; then each rank's scaler must find inf or nan too"
AUTOCAST = 'model(inputs) under torch.autocast("cpu", torch.bfloat16)'


def eighths(seed: int, rank: int, step: int, size: int) -> Tensor:
    """Numbers from 1/8 to 15/8, none of them 0."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    return torch.randint(1, 16, (1, size), generator=generator) / 8


class Halves(nn.Module):
    """Two layers side by side: what overflows in one of them is not in the other.

    That in `own` has no dimension on ranks 0 and 1, and `rank` elements on another one.
    On rank 0 it comes last, on the others first. The columns of the layers' weights lie
    side by side in memory; so do their gradients'.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = nn.ParameterList([torch.zeros((rank,) if rank > 1 else ())])
        if rank:
            self.own = own
        self.left = nn.Linear(2, 2, bias=False)
        self.right = nn.Linear(2, 2, bias=False)
        if not rank:
            self.own = own

    def forward(self, x: Tensor) -> Tensor:
        """(1, 4) to (1, 2)."""
        mixed: Tensor = self.left(x[:, :2]) + self.right(x[:, 2:]) + self.own[0].sum()
        return mixed


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient does not depend on what it is: that is `targets`."""
    return (outputs.float() * targets.detach()).sum()


def batch_of(seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """One sample: inputs (1, 4) and targets (1, 2)."""
    return eighths(seed, rank, step, 4), eighths(seed + 1, rank, step, 2)


def ported_precision(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """STEPS steps, each with what was before it and what is after it."""
    join(context)
    n, rank = context.world_size, context.rank
    model = Halves(rank)
    for place, parameter in enumerate(model.parameters()):
        drawn = eighths(seed, rank, -1 - place, parameter.numel())
        parameter.data = drawn.reshape(parameter.shape).t().contiguous().t()
    widths: list[str] = []
    for layer in model.children():
        layer.register_forward_hook(lambda *_: widths.append(str(_[2].dtype)))
    optimizer = CountedSGD(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=INIT_SCALE, growth_interval=INTERVAL
    )
    record = []
    for step in range(STEPS):
        inputs, targets = batch_of(seed, rank, step)
        if (step, rank) == (CALM, n - 1):
            inputs[0, 3] = torch.nan
        elif (step, rank) == (CALM + 1, 0):  # the loss stays finite
            overflow = model.left.weight.register_hook(_overflowed)
        before, steps = weights_of(model), optimizer.steps
        scale = scaler.get_scale()
        said = unit.with_torch(model, optimizer, scaler, loss_of, inputs, targets)
        record.append(
            {
                "before": before,
                "after": weights_of(model),
                "kept": [str(p.dtype) for p in model.parameters()],
                "widths": widths[:],
                "scale": scale,
                "next": scaler.get_scale(),
                "steps": optimizer.steps - steps,
                "said": said if isinstance(said, bool) else repr(said)[:20],
            }
        )
        widths.clear()
        if (step, rank) == (CALM + 1, 0):
            overflow.remove()
    leave_default_group()
    return record


def _overflowed(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, torch.inf)


def gradient(seed: int, rank: int, step: int) -> Tensor:
    """Of the model's parameters, in their order."""
    inputs, targets = batch_of(seed, rank, step)
    own = targets.sum().expand(max(1, rank))
    halves = [(targets.T * half).flatten() for half in inputs.chunk(2, 1)]
    return torch.cat([own, *halves] if rank else [*halves, own])


# ── C1: the types, and the step ─────────────────────────────────────────────────────


@clause("mixed_precision.port", "C1", worlds=WORLDS, runs=[on_ranks(ported_precision)])
def computed_narrow_kept_wide(runs: Runs) -> str | None:
    """The dtypes of activations and weights, then the weights after each step."""
    run, n = finished(runs, ported_precision), runs.world_size
    for step in range(CALM):
        records = [rank[step] for rank in run.values]
        _expect_types(records)
        _expect_step(runs.seed, records, step)
    return f"n = {n}: activations torch.bfloat16, weights torch.float32"


def _expect_types(records: list[dict[str, Any]]) -> None:
    for rank, record in enumerate(records):
        evidence = Evidence(
            rank,
            "types",
            f"weights {', '.join(record['kept'])}   "
            f"activations {', '.join(record['widths']) or 'none'}",
        )
        if set(record["kept"]) != {"torch.float32"}:
            raise NotYetError(
                f"on rank {rank}, the model's weights have become "
                f"{listed(sorted({*record['kept']}))}, expected float32",
                slug="weights-narrowed",
                evidence=(evidence,),
                rule="autocast does not change the weights: no model.bfloat16()",
            )
        if record["widths"] != ["torch.bfloat16"] * 2:
            wide = record["widths"] == ["torch.float32"] * 2
            raise NotYetError(
                f"on rank {rank}, the model ran in float32, expected bfloat16"
                if wide
                else f"on rank {rank}, the layers' outputs are "
                f"{listed(record['widths']) or 'no tensors'}, expected two in bfloat16",
                slug="autocast-elsewhere" if wide else "",
                evidence=(evidence,),
                rule=AUTOCAST,
            )


def _expect_step(seed: int, records: list[dict[str, Any]], step: int) -> None:
    befores = [record["before"] for record in records]
    right = [gradient(seed, rank, step) for rank in range(len(records))]

    def stepped(how: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        return [
            before - LEARNING_RATE * how(rank, own)
            for rank, (before, own) in enumerate(zip(befores, right, strict=True))
        ]

    scales = [record["scale"] for record in records]
    known: list[tuple[str, Callable[[int, Tensor], Tensor], str]] = [
        (
            "never-unscaled",
            lambda r, g: g * scales[r],
            "the optimizer applied gradients still multiplied by the scale, expected "
            "them divided by it",
        ),
        (
            "",
            lambda r, g: g / scales[r],
            "the gradients are divided by the scale, but the loss was never multiplied "
            "by it",
        ),
        (
            "unscaled-twice",
            lambda r, g: g / scales[r] ** 2,
            "the gradients are divided by the scale twice, expected once",
        ),
        (
            "",
            lambda _, g: torch.zeros_like(g),
            "no rank's weights changed, expected a step",
        ),
        (
            "gradients-not-zeroed",
            lambda r, _: _piled_up(seed, r, step, scales[r]),
            "the gradients are added to those of earlier steps, expected this step's "
            "alone",
        ),
    ]
    expect_values(
        [record["after"] for record in records],
        stepped(lambda _, own: own),
        what=f"after step {step + 1}, the weights",
        verb="are",
        tolerance=LOOSE,
        suspects=[
            Suspect(
                slug=slug,
                values=stepped(how),
                sentence=f"in step {step + 1}, {words}",
            )
            for slug, how, words in known
        ],
        rule="zero_grad, backward() of the scaled loss, scaler.step, scaler.update",
    )


def _piled_up(seed: int, rank: int, step: int, scale: float) -> Tensor:
    """Scaled gradients on top of the unscaled ones of the steps before."""
    total = torch.zeros_like(gradient(seed, rank, 0))
    for number in range(step + 1):
        total = gradient(seed, rank, number) + total / scale
    return total


# ── C2: the decision ────────────────────────────────────────────────────────────────


@clause("mixed_precision.port", "C2", worlds=WORLDS, runs=[on_ranks(ported_precision)])
def all_or_none_step(runs: Runs) -> str | None:
    """In each step the ranks do the same, and say what they did."""
    run, n = finished(runs, ported_precision), runs.world_size
    for step in range(STEPS):
        took = _took(run, step)
        culprit = _culprit(step, n)
        if took != [int(culprit is None)] * n:
            raise _wrong_decision(run, step)
        said = [rank[step]["said"] for rank in run.values]
        wrong = [word for word in said if word is not (culprit is None)]
        if wrong:
            raise NotYetError(
                f"step {step + 1} was {'taken' if culprit is None else 'skipped'}, but "
                f"with_torch returned {wrong[0]}, expected {culprit is None}",
                evidence=_told(said, "said"),
                rule="return whether the optimizer stepped, as True or False",
            )
    return f"n = {n}: 2 of {STEPS} steps skipped, by all ranks together"


def _culprit(step: int, n: int) -> int | None:
    return {CALM: n - 1, CALM + 1: 0}.get(step)


def _wrong_decision(run: Run, step: int) -> NotYetError:
    n, culprit = run.world_size, _culprit(step, run.world_size)
    took = _took(run, step)
    words = ["stepped" if count else "skipped" for count in took]
    told = _told(words, "did")
    if culprit is None:
        odd = next(rank for rank, count in enumerate(took) if count != 1)
        return NotYetError(
            f"in step {step + 1}, where no gradient was inf or nan, rank {odd} "
            f"stepped {took[odd]} times, expected once",
            evidence=told,
        )
    had = f"in step {step + 1}, where rank {culprit}'s gradients had inf or nan,"
    if all(took):
        return NotYetError(
            f"{had} all ranks stepped, expected no rank to step",
            slug="overflow-applied",
            evidence=told,
            rule=SHARED,
        )
    spoiled = [
        rank
        for rank, value in enumerate(run.values)
        if took[rank] and not value[step]["after"].isfinite().all()
    ]
    if spoiled:
        return NotYetError(
            f"{had} rank {spoiled[0]} stepped and got inf or nan into its weights, "
            "expected no rank to step",
            evidence=told,
        )
    alone = [s for s in (CALM, CALM + 1) if n > 1 and _alone(run, s)]
    if step in alone and len(alone) < 2:
        sentence = f"{had} only this rank skipped, expected all ranks to skip"
        return NotYetError(sentence, evidence=told)
    if step in alone:
        sentence = f"{had} only this rank skipped, expected all ranks to skip"
        return NotYetError(sentence, slug="skips-alone", evidence=told, rule=SHARED)
    stepped = ranks_in_words([rank for rank, count in enumerate(took) if count])
    sentence = f"{had} {stepped} stepped, expected no rank to step"
    return NotYetError(sentence, evidence=told)


def _took(run: Run, step: int) -> list[int]:
    return [rank[step]["steps"] for rank in run.values]


def _alone(run: Run, step: int) -> bool:
    n = run.world_size
    return _took(run, step) == [int(rank != _culprit(step, n)) for rank in range(n)]


def _told(values: list[Any], state: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(rank, state, str(value)) for rank, value in enumerate(values))


# ── C3: the scale ───────────────────────────────────────────────────────────────────


def scales(n: int, rank: int | None = None, *, moves: bool = True) -> list[float]:
    """After each step; `rank` goes by its own overflows only."""
    scale, good, found = INIT_SCALE, 0, []
    for step in range(STEPS):
        culprit = _culprit(step, n)
        overflow = culprit is not None and rank in (None, culprit)
        good = 0 if overflow else good + 1
        if moves:
            grown = 2.0 if good and good % INTERVAL == 0 else 1.0
            scale *= 0.5 if overflow else grown
        found.append(scale)
    return found


@clause("mixed_precision.port", "C3", worlds=WORLDS, runs=[on_ranks(ported_precision)])
def same_scale(runs: Runs) -> str | None:
    """The scale after every step, on every rank."""
    run, n = finished(runs, ported_precision), runs.world_size
    if _skips_differ(run):
        raise NotJudgedError("the ranks do not skip together: see C2")
    found = [[record["next"] for record in rank] for rank in run.values]
    expected = [scales(n)] * n
    if found == expected:
        return "the scale goes " + ", ".join(f"{scale:g}" for scale in found[0])
    rank, step = next(
        (rank, step)
        for step in range(STEPS)
        for rank in range(n)
        if found[rank][step] != expected[rank][step]
    )
    had, culprit = "", _culprit(step, n)
    if culprit is not None:
        had = f", where rank {culprit} had inf or nan"
    slug, sentence = (
        "",
        (
            f"after step {step + 1}{had}, the scale is {found[rank][step]:g} on rank "
            f"{rank}, expected {expected[rank][step]:g}"
        ),
    )
    if found == [scales(n, rank) for rank in range(n)]:
        slug = "own-scale-per-rank"
        sentence += ": each rank's scaler only saw its own overflows"
    elif found == [scales(n, moves=False)] * n:
        sentence = f"the scale stays {INIT_SCALE:g} in all {STEPS} steps, expected "
        sentence += "scaler.update() to change it"
    raise NotYetError(
        sentence,
        slug=slug,
        evidence=_told([", ".join(f"{s:g}" for s in own) for own in found], "scales"),
        rule="scaler.update() in every step, after every rank's scaler has found the "
        "same",
    )


def _skips_differ(run: Run) -> bool:
    n = run.world_size
    return any(
        rank[step]["steps"] != int(_culprit(step, n) is None)
        for rank in run.values
        for step in range(STEPS)
    )
