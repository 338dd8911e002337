"""Checks of task 2.11, `pipeline_parallel.execute`: numbers, memory and time.

It runs schedules of the checks' own, so a wrong schedule of the learner's cannot fail
it. The last microbatch is smaller than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.messages import expect_messages, reports_made
from distlab.grading.checks.model_parallel_step import judge_losses
from distlab.grading.checks.pipeline_clock import (
    Schedules,
    all_then_all,
    in_turns,
    peak,
    unlike_orders,
)
from distlab.grading.checks.pipeline_kept import expect_let_go
from distlab.grading.checks.pipeline_race import (
    BACKWARD_MS,
    FORWARD_MS,
    RACED,
    Counted,
    Meter,
    raced,
)
from distlab.grading.checks.stages import (
    NOT_YOURS,
    gradients_of,
    make_batch,
    make_like,
    make_stages,
)
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import Suspect, all_close, expect_values
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import SENDS, Evidence
from distlab.sim.plans import closed_forms as forms

WORLDS = (3, 2, 4, 5, 1)
BEFORE = 0.25  # in every .grad, where one is there before
STAGES, MICROBATCHES = 4, 8  # more are played in tests/workbench


@dataclass(frozen=True)
class Case:
    """A schedule to be run; `before` is what is in every .grad by then."""

    name: str
    num_chunks: int
    sizes: tuple[int, ...]
    schedules: Schedules
    before: float = 0.0

    def batches(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches."""
        return [make_batch(seed, i, size) for i, size in enumerate(self.sizes)]


def cases(n: int) -> list[Case]:
    """What is run on n ranks: on many only what grows with them."""
    few, many = (2, 2, 2, 1), (*(2,) * (n + 1), 1)
    found = [Case("1F1B", 1, many, in_turns(n, len(many)), BEFORE)]
    if n <= 3:
        unlike = unlike_orders(n, len(few))
        found = [
            Case("GPipe", 1, few, all_then_all(n, len(few))),
            *found,
            Case("GPipe, some ranks last back first", 1, few, unlike),
        ]
    if n > 1:
        sizes = (*(2,) * (n * max(1, 4 // n) - 1), 1)
        schedules = in_turns(n, len(sizes), 2)
        found.append(Case("interleaved", 2, sizes, schedules))
    return found


# ── on the ranks ────────────────────────────────────────────────────────────────────


def run_schedules(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """Each case, on fresh stages; each is reported as it begins."""
    found = []
    for place, case in enumerate(cases(context.world_size)):
        context.report(place)
        found.append(_run(context, unit, seed, case))
    return found


def _run(
    context: RankContext, unit: ModuleType, seed: int, case: Case
) -> dict[str, Any]:
    n, rank, device = context.world_size, context.rank, context.comm.device
    num_stages = n * case.num_chunks
    every = make_stages(seed, num_stages)
    mine = [chunk * n + rank for chunk in range(case.num_chunks)]
    meter, full = Meter(), Meter()
    chunks = []
    for stage in mine:
        every[stage].to(device)
        for parameter in every[stage].parameters():
            if case.before:
                parameter.grad = torch.full_like(parameter, case.before)
        like = make_like(num_stages, stage).to(device)
        chunks.append(unit.Chunk(Counted(every[stage], meter, full), like))
    microbatches = [
        (
            (torch.full_like(x, NOT_YOURS) if rank else x).to(device),
            (y if rank == n - 1 else torch.zeros_like(y)).to(device),
        )
        for x, y in case.batches(seed)
    ]
    schedule = [unit.Action(*entry) for entry in case.schedules[rank]]
    loss = unit.execute(
        context.comm, chunks, schedule, nn.functional.cross_entropy, microbatches
    )
    is_number = isinstance(loss, int | float) or (
        isinstance(loss, Tensor) and loss.numel() == 1
    )
    return {
        "gradients": torch.cat([gradients_of(every[stage]) for stage in mine]),
        "loss": float(loss) if is_number else None,
        "kept": (full.peak, meter.peak),
        "left": meter.left,
    }


# ── in one process ──────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _gradients(
    seed: int, n: int, place: int, weights: tuple[float, ...]
) -> tuple[list[Tensor], Tensor]:
    """By rank, of a weighted sum of the microbatches' mean losses; and that sum."""
    case = cases(n)[place]
    stages = make_stages(seed, n * case.num_chunks)
    model = nn.Sequential(*stages)
    total = torch.zeros((), dtype=torch.float64)
    for weight, (inputs, targets) in zip(weights, case.batches(seed), strict=True):
        total = total + weight * nn.functional.cross_entropy(model(inputs), targets)
    total.backward()
    return [
        torch.cat([gradients_of(stage) for stage in stages[rank::n]])
        for rank in range(n)
    ], total.detach()


def _shares(case: Case) -> tuple[float, ...]:
    return tuple(size / sum(case.sizes) for size in case.sizes)


def _suspects(seed: int, n: int, place: int) -> list[Suspect]:
    case = cases(n)[place]
    m = len(case.sizes)

    def made(*weights: float) -> list[Tensor]:
        return [case.before + g for g in _gradients(seed, n, place, weights)[0]]

    def last(weight: float) -> Suspect:
        return Suspect(
            slug="last-microbatch-only",
            values=made(*(0.0,) * (m - 1), weight),
            sentence=f"{case.name}: the gradients are those of the last microbatch "
            "alone",
            rule="backward() adds to .grad: let it, from microbatch to microbatch",
        )

    found = [
        Suspect(
            slug="microbatches-summed",
            values=made(*(1.0,) * m),
            sentence=f"{case.name}: the gradients are the sum of the {m} microbatches' "
            "mean gradients, never divided",
            rule="a microbatch counts as its share of all samples",
        ),
        Suspect(
            slug="mean-of-microbatches",
            values=made(*(1.0 / m,) * m),
            sentence=f"{case.name}: each microbatch counts a {m}th, but the last one "
            f"has {case.sizes[-1]} of {sum(case.sizes)} samples",
            rule="a microbatch counts as its share of all samples",
        ),
    ]
    grown = _gradients(seed, n, place, _shares(case))[0]
    if case.num_chunks == 1:
        found += _backward_in_two(case, grown)
    if case.schedules[0][-1][1] == m - 1:  # it comes last, so it is what is left
        found += [last(1.0), last(1.0 / m), last(_shares(case)[-1])]
    return found


def _backward_in_two(case: Case, grown: list[Tensor]) -> list[Suspect]:
    """What goes wrong where backward goes to the input first, then to the weights."""
    return [
        Suspect(
            slug="weight-gradients-missing",
            values=[torch.full_like(gradient, case.before) for gradient in grown],
            sentence=f"{case.name}: gradients go from stage to stage, but nothing was "
            "added to any .grad",
            rule="backward has two results: the gradient of the input, to be sent, and "
            "those of the weights, to be added up",
        ),
        Suspect(
            slug="backward-twice",
            values=[case.before + (1 + (r > 0)) * g for r, g in enumerate(grown)],
            sentence=f"{case.name}: every stage but the first has its gradients twice",
            rule="each backward() adds to every .grad on its way: what is to have "
            "gradients can be named, torch.autograd.grad(output, x, gradient)",
        ),
    ]


# ── what went wrong ─────────────────────────────────────────────────────────────────


def _run_all(impl: Implementation, harness: RankHarness) -> Run:
    """The schedules on the ranks; what stops them is told in the words of this task."""
    try:
        return harness.run(impl, run_schedules)
    except NotYetError as error:
        run = harness.latest
        if run is None:
            raise
        waits = {record.waiting["op"] for record in run.ranks if record.waiting}
        if error.slug in ("", "mismatched-buffers") and _without_tags(run):
            error.message = f"no message has its tag: {error.message}"
            error.rule = (
                "of two messages between the same ranks the tag says which is which: "
                "comm.recv(x, *source) passes rank and tag"
            )
        elif error.kind == "DEADLOCK" and not error.slug and "isend" in waits:
            error.rule = "start a send and go on; wait for it when all is done"
        if error.kind in ("DEADLOCK", "TIME") or error.slug == "raised":
            error.message = f"{_running(run)}{error.message}"
        raise


def _running(run: Run) -> str:
    """The schedule in which ranks are stuck or failed, as the start of a sentence."""
    begun = reports_made(run)
    return f"{cases(run.world_size)[begun - 1].name}: " if begun else ""


def _without_tags(run: Run) -> bool:
    """Whether no call has a tag, though two messages went the same way."""
    calls = [(r.rank, c) for r in run.ranks for c in r.calls() if c["op"] in SENDS]
    ways = [(rank, call["dst"]) for rank, call in calls]
    return len(ways) > len(set(ways)) and not any(call["tag"] for _, call in calls)


def _expect_no_more_runs(runs: list[int], late: str) -> None:
    rank = runs.index(max(runs))
    if runs[rank] > MICROBATCHES:
        raise NotYetError(
            f"{late}; the stage of rank {rank} goes forward {runs[rank]} times",
            slug="stage-runs-again",
            rule="keep the output of the forward: it is what goes backward, too",
        )


# ── the clauses ─────────────────────────────────────────────────────────────────────


@clause("pipeline_parallel.execute", "C1", worlds=WORLDS)
def numbers_of_one_process(impl: Implementation, harness: RankHarness) -> str | None:
    """V: gradients and loss, whatever the schedule."""
    run = _run_all(impl, harness)
    n, seed = harness.world_size, harness.seed
    worst = 0.0
    for place, case in enumerate(cases(n)):
        grown, loss = _gradients(seed, n, place, _shares(case))
        expected = [case.before + gradients for gradients in grown]
        actual = [value[place]["gradients"] for value in run.values]
        if case.before and all_close(actual, grown):
            raise NotYetError(
                f"{case.name}: the gradients are right, but what was in .grad before "
                "is gone",
                rule="add to .grad; to set it to zero is the caller's business",
            )
        expect_values(
            actual,
            expected,
            what=f"{case.name}: what is in the .grad of the stage",
            suspects=partial(_suspects, seed, n, place),
            rule="which microbatch's graph, and which gradient, belong together?",
        )
        judge_losses([value[place]["loss"] for value in run.values], loss)
        gap = max(
            float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True)
        )
        worst = max(worst, gap)
    expect_messages(run, "the gradients are right, but not by way of comm")
    names = ", ".join(case.name for case in cases(n))
    return f"n = {n}: {names}: gradients {worst:.0e} from one process's"


@clause("pipeline_parallel.execute", "C2", worlds=(3, 4))
def nothing_is_kept(impl: Implementation, harness: RankHarness) -> str | None:
    """M: no more graphs alive than the schedule has forwards on their way.

    One more is forgiven if backward() has emptied it: a variable may have its name,
    until it is needed for the next one.
    """
    run = _run_all(impl, harness)
    every = list(enumerate(cases(harness.world_size)))
    for place, case in every:
        wanted = [peak(schedule) for schedule in case.schedules]
        peaks = [
            graphs if graphs > w + 1 else full
            for (full, graphs), w in zip(
                [value[place]["kept"] for value in run.values], wanted, strict=True
            )
        ]
        if any(p > w for p, w in zip(peaks, wanted, strict=True)):
            total = len(case.sizes) * case.num_chunks
            raise NotYetError(
                f"{case.name}: more microbatches are kept than are on their way",
                slug="activations-kept" if set(peaks) == {total} else "",
                evidence=tuple(
                    Evidence(
                        rank=rank,
                        state="kept" if p > w else "right",
                        text=f"{p} of {total} at once, {w} on their way",
                    )
                    for rank, (p, w) in enumerate(zip(peaks, wanted, strict=True))
                ),
                rule="after its backward let go of x, output and all that holds them; "
                "retain_graph=True holds them too",
            )
    for place, case in reversed(every):  # in 1F1B, before GPipe, it costs memory
        left = [value[place]["left"] for value in run.values]
        expect_let_go(case.name, case.schedules, left)
    return None


@clause("pipeline_parallel.execute", "C3", worlds=(2,))
def nobody_waits_in_vain(impl: Implementation, harness: RankHarness) -> str | None:
    """T: on simulated ranks GPipe and 1F1B take no longer than their formula says.

    Less is for who sends the gradient of the input before that of the weight is there.
    """
    _run_all(impl, harness)
    told = raced(impl, harness, STAGES, MICROBATCHES)
    formula_s = forms.gpipe_s(STAGES, MICROBATCHES, FORWARD_MS, BACKWARD_MS) / 1000
    kept = ""
    for place, name in enumerate(RACED):
        took_s = max(value[place]["time_s"] for value in told)
        if round(1e12 * took_s) > round(1e12 * formula_s):
            late = (
                f"{STAGES} simulated ranks, {MICROBATCHES} microbatches, {name}: "
                f"{1000 * took_s:.0f} ms, where {1000 * formula_s:.0f} are enough"
            )
            _expect_no_more_runs([value[place]["runs"] for value in told], late)
            raise NotYetError(
                late,
                slug="needless-waiting",
                rule="start a send and go on; wait for it when all is done",
            )
        kept += f", {name} keeps {told[0][place]['peak']} on rank 0"
    return f"{STAGES} × {MICROBATCHES}, simulated: {1000 * took_s:.0f} ms{kept}"
