"""Checks of task 1.11, `trainer.fit`: the whole training, and what it reports.

The loader is the check's own, so that a mistake in 1.10 is not blamed on 1.11; what
the learner's fit calls of 1.5, 1.12 and 1.13 is told apart by the grader.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.evaluate import numbers_of
from distlab.grading.checks.fit_mistakes import (
    expect_as_many_steps,
    expect_averaging,
    expect_epochs,
    suspects_of,
)
from distlab.grading.checks.fit_reference import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_EPOCHS,
    Net,
    Shares,
    held_out_of,
    mean_loss,
    right_fit,
)
from distlab.grading.checks.shares import TAKE_PART, on_one_rank_only, run_or_name
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import (
    Suspect,
    all_close,
    digest,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.reference import weights_of
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence, evidence

WORLDS = (3, 2, 4, 7, 1)
NEAR = 1e-5  # the metrics are for reading
AT_THE_END = "evaluate at the end of each epoch"


class Noted(torch.optim.SGD):
    """SGD with momentum that notes what is called, and when."""

    def __init__(self, model: Net, events: list[str]) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._events = events

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        self._events.append("zero_grad")
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        self._events.append("step")
        return super().step(closure)


def fit_once(
    context: RankContext, unit: ModuleType, seed: int, full: bool = False
) -> dict[str, Any]:
    """A training from different weights on each rank, of two epochs."""
    rank, n = context.rank, context.world_size
    events: list[str] = []
    lines: list[str] = []
    device = context.comm.device
    # In evaluation mode, as some other function may have left it.
    model = Net(seed + 31 * rank).to(device).eval()
    model.last.weight.register_post_accumulate_grad_hook(
        lambda _: events.append("backward")
    )
    loader = Shares(seed, rank, n, full=full, device=device)
    history = unit.fit(
        context.comm,
        model,
        Noted(model, events),
        mean_loss,
        loader,
        [(x.to(device), y.to(device)) for x, y in held_out_of(seed, rank, n)],
        NUM_EPOCHS,
        log=lambda *said: lines.append(" ".join(map(str, said))),
    )
    return {
        "weights": weights_of(model),
        "history": _numbers(history),
        "lines": lines,
        "set_to": loader.set_to,
        "used": loader.used,
        "events": events,
        "trained_in": model.trained_in,
    }


@clause("trainer.fit", "C1", worlds=WORLDS)
def weights_of_one_process(impl: Implementation, harness: RankHarness) -> str | None:
    """V and X: the weights after two epochs are one process's, on every rank."""
    run = _fitted(impl, harness)
    n, seed = harness.world_size, harness.seed
    expect_epochs(run)
    weights = [value["weights"] for value in run.values]
    expected = right_fit(seed, n).weights
    if not all_close(weights, expected):
        expect_averaging(run)
        expect_as_many_steps(run)
        expect_values(
            weights,
            expected,
            what=f"the weights after {NUM_EPOCHS} epochs",
            verb="are",
            suspects=suspects_of(run, seed),
            rule="an equal start; then each step with the mean over all samples",
        )
    expect_equal_bits(
        weights,
        what=f"the weights after {NUM_EPOCHS} epochs",
        rule="every rank must apply the very same averaged gradient",
    )
    worst = max(float((w - expected[0]).abs().max()) for w in weights)
    return (
        f"n = {n}: weights {worst:.0e} from one process's, digest "
        f"{digest(weights[0])} on every rank"
    )


@clause("trainer.fit", "C2", worlds=WORLDS)
def metrics_of_each_epoch(impl: Implementation, harness: RankHarness) -> str | None:
    """V: loss and accuracy on what was held out, after each epoch, everywhere."""
    run = _fitted(impl, harness)
    n = harness.world_size
    right = right_fit(harness.seed, n)
    if not all_close([value["weights"] for value in run.values], right.weights):
        raise NotJudgedError("the weights are wrong: see C1")
    for rank, value in enumerate(run.values):
        history = value["history"]
        if history is None:
            raise NotYetError(
                f"fit returned no list of metrics on rank {rank}",
                slug="returned-none",
                rule="collect what evaluate returns after each epoch, on every rank",
            )
        if len(history) != NUM_EPOCHS:
            raise NotYetError(
                f"fit returned {len(history)} metrics on rank {rank} after "
                f"{NUM_EPOCHS} epochs",
                rule="evaluate after each epoch and append the result, on every rank: "
                "outside of `if comm.rank == 0`",
            )
    found = [torch.tensor(value["history"]).double() for value in run.values]
    expected = torch.tensor(right.metrics, dtype=torch.float64)
    expect_values(
        found,
        same_everywhere(expected, n),
        what="the (loss, accuracy) of each epoch",
        suspects=[
            Suspect(
                slug="",
                values=same_everywhere(torch.tensor(wrong).double(), n),
                sentence=f"the metrics of each epoch are those {whose}",
                rule=rule,
            )
            for wrong, whose, rule in (
                ([right.metrics[-1]] * NUM_EPOCHS, "of the last one", AT_THE_END),
                (right.before, "of the model before it", AT_THE_END),
                (right.training, "on the training data", "evaluate on held_out"),
            )
        ],
        tolerance=NEAR,
        rule="evaluate the trained model after each epoch, over all ranks' held-out "
        "batches",
    )
    return None


@clause("trainer.fit", "C3", worlds=WORLDS)
def one_rank_logs(impl: Implementation, harness: RankHarness) -> str | None:
    """J: log is called once per epoch, by one rank alone."""
    run = _fitted(impl, harness)
    lines = [value["lines"] for value in run.values]
    callers = [rank for rank, said in enumerate(lines) if said]
    if not callers:
        printed = any(record.output.strip() for record in run.ranks)
        but = "; something was printed, but log is what the caller hands in"
        raise NotYetError(
            f"no rank called log{but * printed}",
            rule="one rank calls log(line) after each epoch, in place of print(line)",
        )
    if len(callers) > 1:
        raise NotYetError(
            f"{len(callers)} of {run.world_size} ranks called log: every line comes "
            f"{len(callers)} times",
            slug="every-rank-writes",
            evidence=_lines(lines),
            rule="one rank speaks for all, for instance rank 0",
        )
    (caller,) = callers
    if len(lines[caller]) != NUM_EPOCHS or any("\n" in x for x in lines[caller]):
        raise NotYetError(
            f"in {NUM_EPOCHS} epochs rank {caller} called log {len(lines[caller])} "
            "times" + (", with line breaks" if "\n" in "".join(lines[caller]) else ""),
            evidence=_lines(lines),
            rule="once per epoch, with one line",
        )
    return None


def _fitted(impl: Implementation, harness: RankHarness) -> Run:
    def name(run: Run) -> NotYetError | None:
        control = harness.observe(impl, fit_once, full=True)
        harness.latest = run
        if control.outcome != "finished":
            return on_one_rank_only(run)
        return NotYetError(
            "the ranks lose each other where one has no sample in a step: with "
            "samples on every rank they all get to the end",
            slug="no-samples-no-call",
            evidence=evidence(run),
            rule=TAKE_PART,
            kind="DEADLOCK" if run.outcome == "deadlock" else "NOT YET",
            fatal=True,
        )

    return run_or_name(impl, harness, fit_once, name)


def _lines(lines: list[list[str]]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            rank=rank,
            state="logged",
            text=f"{len(said)} lines" + (f", the first: {said[0]}" if said else ""),
        )
        for rank, said in enumerate(lines)
    )


def _numbers(history: Any) -> list[tuple[float, float]] | None:
    if not isinstance(history, list | tuple):
        return None
    pairs = [numbers_of(metrics) for metrics in history]
    return None if None in pairs else [pair for pair in pairs if pair]
