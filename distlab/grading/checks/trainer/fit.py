"""Checks of task 1.11, `trainer.fit`: the whole training, and what it reports.

The loader is the check's own, so that a mistake in 1.10 is not blamed on 1.11; what
the learner's fit calls of 1.5 to 1.7 is told apart by the grader.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from distlab.digests import digest
from distlab.grading.checks.trainer.fit_mistakes import (
    expect_averaging,
    expect_epochs,
    expect_steps,
    loss_suspects,
    suspects_of,
)
from distlab.grading.checks.trainer.fit_reference import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_EPOCHS,
    SIZES,
    Net,
    RankBatches,
    mean_loss,
    right_fit,
)
from distlab.grading.clause import clause
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.uneven import on_one_rank_only, run_or_name
from distlab.grading.kit.values import (
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 7, 1)


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


def fit_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
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
    loader = RankBatches(seed, rank, n, device)
    history = unit.fit(
        context.comm,
        model,
        Noted(model, events),
        mean_loss,
        loader,
        NUM_EPOCHS,
        log=lambda *said: lines.append(" ".join(map(str, said))),
    )
    return {
        "weights": weights_of(model),
        "history": _history(history),
        "lines": lines,
        "set_to": loader.set_to,
        "used": loader.used,
        "events": events,
        "trained_in": model.trained_in,
    }


@clause("trainer.fit", "C1", worlds=WORLDS, runs=[on_ranks(fit_once)])
def weights_of_one_process(runs: Runs) -> str | None:
    """The weights after two epochs are one process's, on every rank."""
    run = _fitted(runs)
    n, seed = runs.world_size, runs.seed
    expect_epochs(run)
    weights = [value["weights"] for value in run.values]
    expected = right_fit(seed, n).weights
    if not all_close(weights, expected):
        expect_averaging(run)
        expect_steps(run)
        expect_values(
            weights,
            expected,
            what=f"the weights after {NUM_EPOCHS} epochs",
            verb="are",
            suspects=suspects_of(run, seed),
        )
    expect_equal_bits(
        weights,
        what=f"the weights after {NUM_EPOCHS} epochs",
        verb="are",
        rule="every rank must apply the very same averaged gradient",
    )
    worst = max(float((w - expected[0]).abs().max()) for w in weights)
    return (
        f"n = {n}: weights {worst:.0e} from the single-process baseline, digest "
        f"{digest(weights[0])} on every rank"
    )


@clause("trainer.fit", "C2", worlds=WORLDS, runs=[on_ranks(fit_once)])
def loss_of_each_epoch(runs: Runs) -> str | None:
    """The mean training loss over all samples of each epoch, on every rank."""
    run = _fitted(runs)
    n = runs.world_size
    right = right_fit(runs.seed, n)
    if not all_close([value["weights"] for value in run.values], right.weights):
        raise NotJudgedError("the weights are wrong: see C1")
    for rank, value in enumerate(run.values):
        _expect_history(rank, value["history"])
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    expected = (right.losses.mean(2) * sizes).sum(1) / sizes.sum()
    expect_values(
        [torch.tensor(value["history"], dtype=torch.float64) for value in run.values],
        same_everywhere(expected, n),
        what="the mean training loss of each epoch",
        suspects=loss_suspects(right.losses, expected),
        rule="add up loss × samples over the batches; divide by the epoch's samples",
    )
    return None


@clause("trainer.fit", "C3", worlds=WORLDS, runs=[on_ranks(fit_once)])
def one_rank_logs(runs: Runs) -> str | None:
    """One rank alone calls log, once per epoch."""
    run = _fitted(runs)
    lines = [value["lines"] for value in run.values]
    callers = [rank for rank, said in enumerate(lines) if said]
    if not callers:
        printed = any(record.output.strip() for record in run.ranks)
        but = "a line was printed, but "
        raise NotYetError(
            f"{but * printed}no rank called log, expected one rank to call it after "
            "each epoch",
            rule="one rank calls log(line) after each epoch, in place of print(line)",
        )
    if len(callers) > 1:
        raise NotYetError(
            f"{len(callers)} of {run.world_size} ranks called log, so every line "
            f"appears {len(callers)} times, expected one rank to call it",
            slug="every-rank-writes",
            evidence=_lines(lines),
            rule="one rank logs, for instance rank 0",
        )
    (caller,) = callers
    if len(lines[caller]) != NUM_EPOCHS or any("\n" in x for x in lines[caller]):
        raise NotYetError(
            f"in {NUM_EPOCHS} epochs, rank {caller} called log "
            f"{_times(lines[caller])}, expected one line per epoch",
            evidence=_lines(lines),
            rule="call log once per epoch, with one line",
        )
    return None


def _times(lines: list[str]) -> str:
    count = len(lines)
    breaks = " with line breaks" if "\n" in "".join(lines) else ""
    return ("once" if count == 1 else f"{count} times") + breaks


def _fitted(runs: Runs) -> Run:
    return run_or_name(runs, fit_once, on_one_rank_only)


def _expect_history(rank: int, history: Any) -> None:
    if history is None:
        raise NotYetError(
            f"fit returned no list on rank {rank}, expected each epoch's loss on every "
            "rank",
            slug="returned-none",
            rule="return a list with the mean training loss of each epoch",
        )
    if len(history) != NUM_EPOCHS:
        raise NotYetError(
            f"fit returned {len(history)} loss{'es' * (len(history) != 1)} for "
            f"{NUM_EPOCHS} epochs on rank {rank}, expected {NUM_EPOCHS}",
            rule="append one loss per epoch, on every rank: outside of "
            "`if comm.rank == 0`",
        )
    for item in history:
        if not isinstance(item, int | float):
            is_tensor = item == "Tensor"
            raise NotYetError(
                f"fit's list on rank {rank} contains a {item}, expected a float",
                slug="not-a-float" if is_tensor else "",
                rule="train_step returns a float: compute with floats",
            )


def _lines(lines: list[list[str]]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            rank,
            "logged",
            f"{len(said)} lines" + (f", the first: {said[0]}" if said else ""),
        )
        for rank, said in enumerate(lines)
    )


def _history(history: Any) -> list[float | str] | None:
    """What fit returned, if it is a list; what is no float is there by its type."""
    if not isinstance(history, list | tuple):
        return None
    return [
        float(item) if isinstance(item, int | float) else type(item).__name__
        for item in history
    ]
