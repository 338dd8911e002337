"""Checks of 4.11, `imagenet_trainer.compose`: C5 to C7, epochs and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoints.training_state import Run
from distlab.given.imagenet_trainer import Job
from distlab.grading.checks.imagenet_trainer import parts
from distlab.grading.checks.imagenet_trainer.parts import new_job
from distlab.grading.clause import clause
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY
from distlab.terminal import enumerated

TASK = "imagenet_trainer.compose"

# ── C5, C6: epochs ──────────────────────────────────────────────────────────────────

START, END = 1, 4


def epochs(context: RankContext, unit: ModuleType, seed: int, stop: int) -> Any:
    """`fit`, of a job that was restored in epoch START; it stops after `stop` steps."""
    log: list[str] = []
    job = new_job(context.comm, seed, 1, 1e9)
    engine: Any = job.engine
    job.loader = parts.Loader(START, log)
    job.model.eval()
    prepared: list[int] = []
    evaluated: list[bool] = []
    kept: list[bool] = []
    resumed: list[bool] = []
    before: list[Tensor] = []

    def prepare(inputs: Tensor, targets: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        prepared.append(epoch)
        resumed.append(not before or torch.equal(weights_of(job.model), before[0]))
        return inputs, targets

    def evaluate(model: Any) -> float:
        same = torch.equal(weights_of(model), job.average.state_dict()["weights"])
        evaluated.append(same and model is job.model)
        job.model.eval()
        return 0.25 * len(evaluated)

    def on_step(epoch: int, loss: float) -> bool:
        before[:] = [weights_of(job.model)]
        log.append(f"step of epoch {epoch}" if loss == loss else "nan")
        return sum(line.startswith("step") for line in log) != stop

    def on_epoch(epoch: int, metrics: Any) -> None:
        kept.append(torch.equal(weights_of(job.model), before[0]))
        log.append(f"epoch {epoch} gives {metrics}")

    job.prepare, job.evaluate = prepare, evaluate
    unit.fit(job, END, on_step, on_epoch)
    return {
        "log": log,
        "training": engine.was_training,
        "prepared": prepared,
        "evaluated": evaluated,
        "kept": kept,
        "resumed": [*resumed, torch.equal(weights_of(job.model), before[0])],
    }


def _expected_log(stop: int) -> list[str]:
    log: list[str] = []
    for epoch in range(START, END):
        count = 1 if epoch == START else 2
        log += [f"set_epoch({epoch})"] * (epoch > START)
        log += [f"epoch {epoch}: {count} batches"]
        for _ in range(count):
            log.append(f"step of epoch {epoch}")
            if sum(line.startswith("step") for line in log) == stop:
                return log
        log.append(f"epoch {epoch} gives {0.25 * (epoch - START + 1)}")
    return log


STOPS = "when on_step returns False in the second step"
WHOLE, STOPPED = on_ranks(epochs, stop=0), on_ranks(epochs, stop=2).when(STOPS)


@clause(TASK, "C5", worlds=(1,), plays=(1,), runs=[WHOLE, STOPPED])
def in_order(runs: Runs) -> str | None:
    """What fit does with the loader, in which order, and in which mode."""
    for stop in (0, 2):
        record = worked_out(runs, epochs, stop=stop).values[0]
        expected, log = _expected_log(stop), record["log"]
        setting = "" if not stop else f"{STOPS}, "
        for place, wanted in enumerate(expected):
            got = log[place] if place < len(log) else "nothing more"
            if got != wanted and place == 0 and got.startswith("set_epoch"):
                raise NotYetError(
                    f"when the loader was restored in epoch {START}, fit began with "
                    f"{got}, expected that epoch first",
                    rule="begin with job.loader.epoch",
                )
            if got != wanted:
                forgot = wanted.startswith("set_epoch") and not got.startswith("set")
                raise NotYetError(
                    f"{setting}{_last(log, place)} {_next(got, place)}, expected "
                    f"{_noun(wanted)}",
                    slug="set-epoch-forgotten" if forgot else "",
                    rule="set_epoch(epoch) before the first batch of each epoch"
                    if forgot
                    else "",
                )
        if len(log) > len(expected):
            raise NotYetError(
                f"{setting}fit went on with {_noun(log[len(expected)])}, expected it "
                "to return"
            )
        if not all(record["training"]):
            step = record["training"].index(False) + 1
            raise NotYetError(
                f"{setting}the model was in evaluation mode in step {step}, expected "
                "training mode",
                slug="evaluation-mode-kept",
                rule="model.train() at the beginning of each epoch",
            )
        steps_of = [int(line.split()[-1]) for line in log if line.startswith("step")]
        if record["prepared"] != steps_of:
            raise NotYetError(
                f"{setting}fit called job.prepare for batches of "
                f"{_all(record['prepared'])}, expected {_all(steps_of)}"
            )
    return f"restored in epoch {START} of {END}, and stopped in step 2"


def _last(log: list[str], place: int) -> str:
    return f"after {_noun(log[place - 1])}, fit" if place else "fit"


def _next(line: str, place: int) -> str:
    if line == "nothing more":
        return "returned"
    return f"{'continued' if place else 'began'} with {_noun(line)}"


def _all(epochs: list[int]) -> str:
    return f"epochs {enumerated(epochs)}" if epochs else "no epoch"


def _noun(line: str) -> str:
    """A line of the log as what fit does."""
    match line.split():
        case ["epoch", epoch, num, "batches"]:
            es = "es" * (num != "1")
            return f"a loop over {num} batch{es} of epoch {epoch.rstrip(':')}"
        case ["step", "of", "epoch", epoch]:
            return f"on_step({epoch}, loss)"
        case ["epoch", epoch, "gives", *metrics]:
            return f"on_epoch({epoch}, {' '.join(metrics)})"
        case ["nan"]:
            return "on_step with a loss of nan"
    return line


@clause(TASK, "C6", worlds=(1,), plays=(1,), runs=[WHOLE], after=("C5",))
def averaged(runs: Runs) -> str | None:
    """The weights in each evaluation, and those after it."""
    record = worked_out(runs, epochs, stop=0).values[0]
    if not all(record["evaluated"]):
        raise NotYetError(
            "job.evaluate got a model without the weights of job.average, expected "
            "job.model with these weights",
            slug="own-weights-evaluated",
            rule="with job.average.in_place_of(job.model): around job.evaluate",
        )
    if not all(record["resumed"]):
        raise NotYetError(
            "after an evaluation, training continues with other weights, expected "
            "the weights of the last step before that evaluation"
        )
    if not all(record["kept"]):
        raise NotYetError(
            "in on_epoch, the model's weights are not those of the last step, expected "
            "them to be restored after the evaluation",
            rule="call on_epoch after the block of in_place_of",
        )
    return f"{END - START} evaluations"


# ── C7: what is saved ───────────────────────────────────────────────────────────────

NAMES = ("scheduler", "scaler", "loader", "average")


def saved(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Which objects of the job the Run has, and under which names."""
    job = new_job(context.comm, seed, 1, 1e9)
    run = unit.run_of(job)
    if not isinstance(run, Run):
        return {"kind": type(run).__name__}
    return {
        "kind": "Run",
        "parts": {str(name): _name_in(job, part) for name, part in run.parts.items()},
        "others": {n: _name_in(job, getattr(run, n)) for n in _OTHERS},
    }


_OTHERS = ("model", "optimizer", "hook")


def _name_in(job: Job, part: Any) -> str:
    """The name of this object in the job, if it is one of its parts."""
    if part is None:
        return "None"
    is_it: Callable[[str], bool] = lambda name: getattr(job, name) is part  # noqa: E731
    names = [name for name in (*_OTHERS, *NAMES, "engine") if is_it(name)]
    return f"job.{names[0]}" if names else f"a {type(part).__name__}"


@clause(TASK, "C7", worlds=(1,), plays=(1,), runs=[on_ranks(saved)])
def all_is_saved(runs: Runs) -> str | None:
    """The parts of the Run are those of the job."""
    record = worked_out(runs, saved).values[0]
    if record["kind"] != "Run":
        raise NotYetError(f"run_of returned a {record['kind']}, expected a Run")
    for name, got in record["others"].items():
        if got != f"job.{name}":
            raise NotYetError(
                f"run_of returned a Run whose {name} is {got}, expected job.{name}"
            )
    found = record["parts"]
    for name in NAMES:
        if name not in found:
            raise NotYetError(
                f'run_of returned a Run without the part "{name}", expected '
                f"job.{name} in it",
                evidence=[(NOBODY, "parts", ", ".join(sorted(found)))],
                slug="part-not-saved",
                rule="what changes from step to step has to be in the checkpoint",
            )
        if found[name] != f"job.{name}":
            raise NotYetError(
                f'the part "{name}" of the Run is {found[name]}, expected job.{name}'
            )
    if extra := sorted(set(found) - set(NAMES)):
        raise NotYetError(
            f'the Run has a part "{extra[0]}", expected only {", ".join(NAMES)}'
        )
    return ", ".join(NAMES)
