"""Run trials on Ray Tune: an actor per trial, on this machine or on a cluster.

    Draws (a Searcher) ─▶ Ray starts the trial ─▶ report ─▶ Asha (a scheduler) ─▶ Tuning

`distlab.engines.search` draws the parameters, so both backends run the same trials. Ray
decides where they run and, with its own ASHA, which ones end early. The process that
called `tune` records when a trial ends. Ray's own record of a search can be 10 s old
when that process is killed, so a trial that had ended since then would run again.

Source: Ray Tune's documentation, "Searcher", "AsyncHyperBandScheduler", "tune.report".
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from distlab.engines import trial as trials
from distlab.engines.expect import EngineError
from distlab.engines.outside import engine
from distlab.engines.ray_strategy import joined, said
from distlab.engines.search import Asha
from distlab.engines.tuning import DONE, FAILED, STOPPED, Tuning

MOST_RUNGS = 40  # Ray wants the largest number of reports: beyond any trial's
NOTHING = (str, ())  # what Ray's own record of the search, never read, has of an object
SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a table at any verbosity
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean what they mean to the caller
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the search, with its error
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may end without a report
}


def run_on_ray_tune(
    tuning: Tuning,
    train_fn: Callable[..., Any],
    scheduler: Asha,
    num_gpus: int,
    trials_per_gpu: int,
    address: str | None,
) -> None:
    """Run all waiting trials.

    Raises:
        EngineError: Ray isn't installed or can't be reached, or the search failed.
    """
    ray, tune = engine("ray", "ray"), engine("ray.tune", "ray")
    if not tuning.waiting:
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    slots = num_gpus * trials_per_gpu
    with (
        joined(ray, address, slots),
        tempfile.TemporaryDirectory(prefix="dl-", dir="/tmp") as place,
    ):
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        needs = {"cpu": 1, "gpu": 1 / trials_per_gpu if has_gpus else 0}
        search = tune.Tuner(
            tune.with_resources(trial_of(tuning, train_fn), needs),
            tune_config=tune.TuneConfig(
                metric="score",
                mode="min",
                num_samples=len(tuning.waiting),
                max_concurrent_trials=slots,
                reuse_actors=False,  # a trial begins in a fresh process
                search_alg=draws(tuning),
                scheduler=asha(tuning, scheduler),
            ),
            run_config=tune.RunConfig(storage_path=place, name="search", verbose=0),
        )
        try:
            search.fit()
        except Exception as error:  # Ray's own, which differ between versions
            raise EngineError(said(error)) from error
        finally:
            tuning.is_over = True


def trial_of(tuning: Tuning, train_fn: Callable[..., Any]) -> Callable[..., None]:
    """Return the function that an actor calls."""
    given = {n: (tuning.parameters(n), tuning.kept(n)) for n in tuning.waiting}
    # By value: to import it, an actor would import the package, and with it torch.
    cloudpickle.register_pickle_by_value(trials)
    try:
        sent = cloudpickle.dumps((trials.LossReport, trials.call, train_fn, given))
    finally:
        cloudpickle.unregister_pickle_by_value(trials)
    folders = list(dict.fromkeys(map(os.path.abspath, sys.path)))
    worst = sys.float_info.max

    def trial(config: dict[str, Any]) -> None:
        sys.path += [folder for folder in folders if folder not in sys.path]
        tune = importlib.import_module("ray.tune")

        def send(losses: list[float]) -> None:
            # Ray leaves a NaN out of a rung's ranking; here it is the last.
            score = losses[-1] if math.isfinite(losses[-1]) else worst
            counted = {"num_reports": len(losses)}
            tune.report({"loss": losses[-1], "score": score, **counted})

        make_report, call, own, by_number = cloudpickle.loads(sent)
        parameters, kept = by_number[config["number"]]
        call(own, parameters, make_report(send, parameters, kept))

    return trial


def draws(tuning: Tuning) -> Any:
    """Return the searcher that Ray asks for the next trial when a slot is free."""
    base = engine("ray.tune.search", "ray").Searcher

    class Draws(base):  # type: ignore[misc, valid-type]
        def suggest(self, trial_id: str) -> Any:
            number = tuning.begin()
            return base.FINISHED if number is None else {"number": number}

        def on_trial_complete(self, trial_id: str, *_: Any, **__: Any) -> None:
            pass

        def save(self, checkpoint_path: str) -> None:
            pass

        def restore(self, checkpoint_path: str) -> None:
            pass

        def __reduce__(self) -> Any:
            return NOTHING

    return Draws(metric="score", mode="min")


def asha(tuning: Tuning, given: Asha) -> Any:
    """Return Ray's ASHA, extended to tell the search about reports and ends."""
    base = engine("ray.tune.schedulers", "ray").ASHAScheduler

    class Scheduler(base):  # type: ignore[misc, valid-type]
        def on_trial_result(self, controller: Any, trial: Any, result: Any) -> Any:
            decision = super().on_trial_result(controller, trial, result)
            tuning.reported(trial.config["number"], result["loss"])
            if decision == base.STOP or tuning.is_too_expensive:
                stopped.add(trial.config["number"])
                return base.STOP
            return decision

        def on_trial_complete(self, controller: Any, trial: Any, result: Any) -> None:
            super().on_trial_complete(controller, trial, result)
            number = trial.config["number"]
            tuning.end(number, STOPPED if number in stopped else DONE)

        def on_trial_error(self, controller: Any, trial: Any) -> None:
            super().on_trial_error(controller, trial)
            tuning.end(trial.config["number"], FAILED, why(trial))

        def __reduce__(self) -> Any:
            return NOTHING

    stopped: set[int] = set()
    return Scheduler(
        time_attr="num_reports",
        grace_period=given.grace,
        reduction_factor=given.factor,
        max_t=given.grace * given.factor**MOST_RUNGS,
    )


def why(trial: Any) -> str:
    """Return the last line of a failed trial's error."""
    # Ray's get_error() looks where the file is copied to, which happens later.
    try:
        text = Path(trial.error_file).read_text(encoding="utf-8")
    except (OSError, TypeError):
        return "the trial failed"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the trial failed"
