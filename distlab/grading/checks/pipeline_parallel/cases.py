"""The schedules that tasks 2.11 to 2.13 run, what they must give, and what stops them.

The schedules are the checks' own, so a wrong schedule of the learner's cannot fail an
executor. The last microbatch is smaller than the others.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.given.pipeline_parallel import LossFn
from distlab.grading.checks.pipeline_parallel.clock import (
    Schedules,
    all_then_all,
    in_turns,
    one_at_a_time,
    unlike_orders,
)
from distlab.grading.checks.pipeline_parallel.losses import WatchedLosses, wrong_losses
from distlab.grading.checks.pipeline_parallel.race import CountedStage, Meter
from distlab.grading.checks.pipeline_parallel.unusual import (
    nan_once,
    negative,
    unusual_stages,
)
from distlab.grading.kit.flat import gradients_of
from distlab.grading.kit.messages import reports_made
from distlab.grading.kit.stages import NOT_YOURS, ROUNDED, make_batch, make_like
from distlab.grading.kit.values import Suspect, all_close, expect_values
from distlab.grading.kit.zoo import loss_of
from distlab.grading.runs import Runs
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import SENDS

WORLDS = (3, 2, 4, 5, 1)
NO_GRADIENT = "x.grad is None: the received x did not require grad"
BEFORE = 0.25  # in every .grad, where one is there before


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule to be run; `before` is what is in every .grad by then."""

    name: str
    num_chunks: int
    sizes: tuple[int, ...]
    schedules: Schedules
    before: float = 0.0
    loss_fn: LossFn = loss_of

    @property
    def said(self) -> str:
        """How a headline about it begins."""
        return f"with {self.name},"

    def batches(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches."""
        return [make_batch(seed, i, size) for i, size in enumerate(self.sizes)]

    def weights(self) -> tuple[float, ...]:
        """The weight of each microbatch's mean loss."""
        return tuple(size / sum(self.sizes) for size in self.sizes)


def all_cases(n: int) -> list[ScheduleCase]:
    """What an executor runs on n ranks: on many only what grows with them."""
    few, many = (2, 2, 2, 1), (*(2,) * (n + 1), 1)
    cases = [ScheduleCase("1F1B", 1, many, in_turns(n, len(many)), BEFORE)]
    if n <= 3:
        cases = [
            ScheduleCase("GPipe", 1, few, all_then_all(n, len(few))),
            *cases,
            ScheduleCase(
                "reordered GPipe",
                1,
                few,
                unlike_orders(n, len(few)),
                loss_fn=negative,
            ),
        ]
    if n > 1:
        sizes = (*(2,) * (n * max(1, 4 // n) - 1), 1)
        schedules = in_turns(n, len(sizes), 2)
        cases.append(ScheduleCase("interleaved 1F1B", 2, sizes, schedules))
    if n == 3:
        name, schedules = "a loss that is nan", all_then_all(n, 2)
        cases.append(ScheduleCase(name, 1, (2, 1), schedules, loss_fn=nan_once))
    return cases


def plain_cases(n: int) -> list[ScheduleCase]:
    """What runs even where each send waits for its receiver."""
    few = (2, 2, 1)
    schedules = one_at_a_time(n, len(few))
    return [ScheduleCase("one microbatch at a time", 1, few, schedules, BEFORE)]


Cases = Callable[[int], list[ScheduleCase]]
Execute = Callable[..., Any]


# ── on the ranks ────────────────────────────────────────────────────────────────────


def run_cases(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    cases: Cases,
    execute: Execute,
    look: bool = False,
) -> list[dict[str, Any]]:
    """Each case, on fresh stages; each is reported as it begins.

    With `look` it is told which variable holds the losses; what is kept is not to be
    judged then.
    """
    results = []
    for number, case in enumerate(cases(context.world_size)):
        context.report(number)
        results.append(_run(context, unit, seed, case, execute, look))
    return results


def _run(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    case: ScheduleCase,
    execute: Execute,
    look: bool,
) -> dict[str, Any]:
    n, rank, device = context.world_size, context.rank, context.comm.device
    num_stages = n * case.num_chunks
    every = unusual_stages(seed, num_stages)
    mine = [chunk * n + rank for chunk in range(case.num_chunks)]
    meter, full = Meter(), Meter()
    chunks = []
    for stage in mine:
        every[stage].to(device)
        for parameter in every[stage].parameters():
            if case.before:
                parameter.grad = torch.full_like(parameter, case.before)
        example = make_like(num_stages, stage).to(device)
        chunks.append(unit.ModelChunk(CountedStage(every[stage], meter, full), example))
    microbatches = [
        (
            (torch.full_like(x, NOT_YOURS) if rank else x).to(device),
            (y if rank == n - 1 else torch.zeros_like(y)).to(device),
        )
        for x, y in case.batches(seed)
    ]
    schedule = [unit.Action(*entry) for entry in case.schedules[rank]]
    watched = WatchedLosses(case.loss_fn, str(unit.__file__))
    with keys_watched(unit):
        loss = execute(
            context.comm,
            chunks,
            schedule,
            watched if look else case.loss_fn,
            microbatches,
        )
    is_number = isinstance(loss, int | float) or (
        isinstance(loss, Tensor) and loss.numel() == 1
    )
    return {
        "gradients": torch.cat([gradients_of(every[stage]) for stage in mine]),
        "loss": float(loss) if is_number else None,
        "kept": (full.peak, meter.peak),
        "left": meter.left,
        "holder": watched.holder,
        "runs": meter.made,
    }


@contextmanager
def keys_watched(unit: ModuleType) -> Iterator[None]:
    """Within the block `free` is called with the keys that both functions agree on.

    Raises:
        TypeError: not so; before `free`, which may be the reference's, stumbles.
    """
    free = getattr(unit, "free", None)
    if not callable(free):
        yield
        return
    code = getattr(free, "__code__", None)
    spliced = code is not None and code.co_filename != unit.__file__

    def watched(action: Any, kept: Any, sends: Any) -> None:
        for key in kept:
            if not (isinstance(key, tuple) and len(key) == 2):
                raise TypeError(
                    f"kept has the key {key!r:.30}; free expects (chunk, microbatch)"
                )
        for key in sends:
            if not (isinstance(key, tuple) and len(key) == 3):
                raise TypeError(
                    f"sends has the key {key!r:.30}; free expects the action"
                )
        own = action.chunk, action.microbatch
        if spliced and action.kind == "B" and own not in kept:
            raise TypeError(
                f"after the backward of microbatch {own[1]} kept has no key {own}: "
                "free removes it, execute must leave it there"
            )
        free(action, kept, sends)

    vars(unit)["free"] = watched
    try:
        yield
    finally:
        vars(unit)["free"] = free


# ── in one process ──────────────────────────────────────────────────────────────────


def gradients(case: ScheduleCase, seed: int, n: int) -> tuple[list[Tensor], Tensor]:
    """By rank, of the mean loss over all samples; and that loss."""
    return _gradients(
        seed, n, case.num_chunks, case.sizes, case.weights(), case.loss_fn
    )


def guesses_of(case: ScheduleCase, seed: int, n: int) -> list[tuple[str, float]]:
    """Wrong losses of a batch, in words."""
    model = nn.Sequential(*unusual_stages(seed, n * case.num_chunks))
    with torch.no_grad():
        return wrong_losses([case.loss_fn(model(x), y) for x, y in case.batches(seed)])


@lru_cache(maxsize=64)
def _gradients(
    seed: int,
    n: int,
    v: int,
    sizes: tuple[int, ...],
    weights: tuple[float, ...],
    loss_fn: LossFn,
) -> tuple[list[Tensor], Tensor]:
    """By rank, of a weighted sum of the microbatches' mean losses; and that sum."""
    stages = unusual_stages(seed, n * v)
    model = nn.Sequential(*stages)
    total = torch.zeros((), dtype=torch.float64)
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        inputs, targets = make_batch(seed, number, size)
        total = total + weight * loss_fn(model(inputs), targets)
    total.backward()
    return [
        torch.cat([gradients_of(stage) for stage in stages[rank::n]])
        for rank in range(n)
    ], total.detach()


def _suspects(seed: int, n: int, case: ScheduleCase) -> list[Suspect]:
    m = len(case.sizes)

    def weighted(*weights: float) -> list[Tensor]:
        sizes, loss_fn = case.sizes, case.loss_fn
        own = _gradients(seed, n, case.num_chunks, sizes, weights, loss_fn)[0]
        return [case.before + gradient for gradient in own]

    def last(weight: float) -> Suspect:
        return Suspect(
            slug="last-microbatch-only",
            values=weighted(*(0.0,) * (m - 1), weight),
            sentence=f"{case.said} the gradients are those of the last microbatch "
            f"alone, expected the mean over all {m} microbatches",
            rule="backward() adds to .grad: let it accumulate over the microbatches",
        )

    suspects = [
        Suspect(
            slug="microbatches-summed",
            values=weighted(*(1.0,) * m),
            sentence=f"{case.said} the gradients are the sum of the {m} microbatches' "
            f"mean gradients, expected the mean over all {sum(case.sizes)} samples",
            rule="weight each microbatch by its samples / all samples",
        ),
        Suspect(
            slug="mean-of-microbatches",
            values=weighted(*(1.0 / m,) * m),
            sentence=f"{case.said} each microbatch has the weight 1/{m}, expected "
            f"{case.sizes[-1]}/{sum(case.sizes)} for the last one, which has "
            f"{case.sizes[-1]} of {sum(case.sizes)} samples",
            rule="weight each microbatch by its samples / all samples",
        ),
    ]
    grown = gradients(case, seed, n)[0]
    if case.num_chunks == 1:
        suspects += _backward_in_two(case, grown)
    if case.schedules[0][-1][1] == m - 1:  # it comes last, so it is what is left
        suspects += [last(1.0), last(1.0 / m), last(case.weights()[-1])]
    return suspects


def _backward_in_two(case: ScheduleCase, grown: list[Tensor]) -> list[Suspect]:
    """What goes wrong where backward goes to the input first, then to the weights."""
    return [
        Suspect(
            slug="weight-gradients-missing",
            values=[torch.full_like(gradient, case.before) for gradient in grown],
            sentence=f"{case.said} gradients go from stage to stage, but no stage "
            "added its weights' gradients to .grad",
            rule="backward has two results: the gradient of the input, to be sent, and "
            "those of the weights, to be added up",
        ),
        Suspect(
            slug="backward-twice",
            values=[case.before + (1 + (r > 0)) * g for r, g in enumerate(grown)],
            sentence=f"{case.said} all stages but the first add their gradients twice, "
            "expected once",
            rule="each backward() adds to every .grad it reaches: name the tensors "
            "that need gradients, torch.autograd.grad(output, x, gradient)",
        ),
    ]


def expect_gradients(case: ScheduleCase, actual: list[Tensor], seed: int) -> float:
    """The largest error of the gradients by rank.

    Raises:
        NotYetError: they are wrong.
    """
    n = len(actual)
    grown = gradients(case, seed, n)[0]
    expected = [case.before + gradient for gradient in grown]
    if case.before and all_close(actual, grown, ROUNDED):
        raise NotYetError(
            f"{case.said} the new gradients replaced what was in .grad, expected them "
            "to be added to it",
            rule="add to .grad; only the caller sets it to zero",
        )
    expect_values(
        actual,
        expected,
        what=f"{case.said} the .grad of the stage",
        tolerance=ROUNDED,
        suspects=partial(_suspects, seed, n, case),
    )
    return max(
        float((a - e).abs().nan_to_num(0.0).max())
        for a, e in zip(actual, expected, strict=True)
    )


# ── what stops them ─────────────────────────────────────────────────────────────────


def finished(runs: Runs, scenario: Any, cases: Cases) -> Run:
    """The run of a scenario; what stops it is told in the words of these tasks."""
    try:
        return runs.finished(scenario)
    except NotYetError as error:
        raise _in_words(error, cases) from error


def _in_words(error: NotYetError, cases: Cases) -> NotYetError:
    run = error.run
    if run is None:
        return error
    waits = {record.waiting["op"] for record in run.ranks if record.waiting}
    if error.slug in ("", "mismatched-buffers") and (untagged := _untagged(run)):
        error = error.but(
            slug="no-tag",
            message=f"{untagged}, so one can be taken for another: {error.message}",
            rule="the tag tells the messages between two ranks apart: "
            "comm.recv(x, *source) passes rank and tag",
        )
    elif error.slug == "raised" and NO_GRADIENT in error.message:
        rule = "after recv: x.requires_grad_(), then run the module"
        error = error.but(slug="input-without-grad", rule=rule)
    elif error.kind == "DEADLOCK" and not error.slug and waits & {"isend", "send"}:
        rule = "start a send and go on; wait for it when all is done"
        error = error.but(rule=rule)
    stopped = error.kind in ("DEADLOCK", "TIME")
    if stopped or error.slug in ("raised", "input-without-grad"):
        begun = reports_made(run)
        if begun:
            name = cases(run.world_size)[begun - 1].name
            error = error.but(situation=f"with {name}")
    return error


def _untagged(run: Run) -> str:
    """Which messages have no tag, in words; in each case one may have the tag 0."""
    links = Tally(
        (record.rank, call["dst"], bool(call["tag"]))
        for record in run.ranks
        for call in record.calls()
        if call["op"] in SENDS
    )
    for (rank, dst, tagged), count in links.items():
        if not tagged and count > max(1, len(run.ranks[rank].marks)):
            if not any(tagged for *_, tagged in links):
                return "the messages were sent without their tags"
            return f"{count} messages from rank {rank} to rank {dst} have no tag"
    return ""
