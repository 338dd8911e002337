"""DistributedTuner: what it draws and ends, and trials as real processes."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distlab.engines import (
    Asha,
    DistributedTuner,
    EngineError,
    choice,
    loguniform,
    uniform,
)
from distlab.engines.search import draw
from distlab.engines.trial import LossReport, call
from distlab.engines.trial_processes import visible_gpu
from distlab.engines.tuning import Tuning


def test_draws_depend_on_seed_and_trial_only() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "width": [8, 16], "x": uniform(2, 3), "c": 7}
    drawn = [draw(space, 0, trial) for trial in range(200)]
    assert drawn[5] == draw(space, 0, 5)
    assert drawn[5] != draw(space, 1, 5)
    assert all(1e-4 <= one["lr"] <= 1 and 2 <= one["x"] <= 3 for one in drawn)
    assert {one["width"] for one in drawn} == {8, 16}
    assert {one["c"] for one in drawn} == {7}
    below = sum(one["lr"] < 1e-2 for one in drawn)
    assert 70 < below < 130  # half, on a logarithmic scale


def test_asha_ends_what_is_not_among_the_best_at_a_rung() -> None:
    asha = Asha(grace=2, reduction_factor=2)
    assert [asha.is_rung(n) for n in range(1, 9)] == [
        n in (2, 4, 8) for n in range(1, 9)
    ]
    assert asha.goes_on(1, 99.0)
    assert asha.goes_on(2, 5.0)
    assert not asha.goes_on(2, 6.0)
    assert asha.goes_on(2, 4.0)
    assert not asha.goes_on(2, math.nan)
    assert not asha.goes_on(2, -math.inf)
    assert asha.goes_on(4, 9.0)  # the first at its rung


NAN = float("nan")


def half() -> Any:
    return 2.5


def locked() -> Callable[..., float]:
    lock = threading.Lock()

    def train_fn(parameters: dict[str, Any], report: Any) -> float:
        with lock:
            return 0.0

    return train_fn


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: choice([]), "has no value"),
        (lambda: uniform(2, 2), "is empty"),
        (lambda: loguniform(0, 1), "low must be more than 0"),
        (lambda: Asha(reduction_factor=1), "reduction_factor"),
        (lambda: DistributedTuner(len, {}, num_gpus=0), "num_gpus is 0"),
        (lambda: DistributedTuner(len, {}, max_cost=1.0), "needs cost_per_gpu_hour"),
        (lambda: DistributedTuner(len, {}, cost_per_gpu_hour=NAN), "cost_per_gpu_hour"),
        (lambda: DistributedTuner(len, {}, max_cost=NAN), "max_cost is nan"),
        (lambda: DistributedTuner(len, {}, backend="rai"), "processes or ray"),
        (lambda: DistributedTuner(len, {}, address="h:1"), "is for backend ray"),
        (lambda: DistributedTuner(len, {"lr": []}), "^lr is .., which has no value"),
        (lambda: DistributedTuner(len, {"x": {"grid_search": [1]}}), "^x is a grid"),
        (lambda: DistributedTuner(lambda: 1.0, {}), "must be a function"),
        (lambda: DistributedTuner(None, {}), "must be a function"),  # type: ignore[arg-type]
        (lambda: DistributedTuner(len, {}).tune(0), "num_samples is 0, must be at"),
        (lambda: DistributedTuner(len, {}).tune(half()), "num_samples is 2.5, must be"),
        (
            lambda: DistributedTuner(locked(), {}).tune(1),
            "train_fn cannot be sent to another process: cannot pickle '_thread.lock'",
        ),
        (
            lambda: DistributedTuner(len, {}, backend="ray", address="ray://h:1"),
            "cannot run through Ray's client",
        ),
    ],
)
def test_what_cannot_be_is_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        make()


# A thread that fails prints a traceback, which is a warning here, and so an error.


def test_a_trial_that_cannot_be_started_ends_the_search() -> None:
    tuner = DistributedTuner(returns(), {"x": [threading.Lock()]}, num_gpus=2)
    with pytest.raises(EngineError, match="TypeError: cannot pickle"):
        tuner.tune(3)
    assert tuner.trials == []


@pytest.mark.parametrize(
    ("returned", "reported"),
    [
        (3, [3.0]),
        (np.float32(0.5), [0.5]),
        (torch.tensor(0.5), [0.5]),
        (Fraction(1, 4), [0.25]),
        ({"loss": 0.5, "accuracy": 1}, [0.5]),
        ({"accuracy": 1}, []),
        (None, []),
        ("0.5", []),
        (torch.zeros(3), []),
    ],
    ids=str,
)
def test_a_number_that_is_returned_is_a_report(
    returned: Any, reported: list[float]
) -> None:
    sent: list[float] = []
    report = LossReport(lambda losses: sent.append(losses[-1]), {}, None)
    call(lambda parameters, report: returned, {}, report)
    call(lambda parameters: returned, {}, report)
    call(lambda *given: returned if len(given) == 2 else "one", {}, report)
    assert sent == reported * 3


def test_a_dictionary_is_reported_and_anything_else_is_no_loss() -> None:
    sent: list[float] = []
    report = LossReport(lambda losses: sent.append(losses[-1]), {}, None)
    report({"loss": np.float32(0.5)})
    assert sent == [0.5]
    for wrong in ("0.5", {"accuracy": 1.0}, None):
        with pytest.raises(TypeError):
            report(wrong)


class Domain:
    """As Ray Tune and SciPy have them."""

    def __init__(self, module: str) -> None:
        self.__class__ = type("Domain", (Domain,), {"__module__": module})

    def sample(
        self, config: Any = None, size: int = 1, random_state: Any = None
    ) -> Any:
        return np.float64(random_state % 1000)


def test_spaces_hold_dictionaries_and_the_domains_of_others() -> None:
    space = {"optim": {"lr": uniform(0, 1), "name": ["a", "b"], "c": {"d": 7}}}
    drawn = [draw(space, 0, trial)["optim"] for trial in range(20)]
    assert {one["name"] for one in drawn} == {"a", "b"}
    assert len({one["lr"] for one in drawn}) == 20
    assert all(one["c"] == {"d": 7} for one in drawn)
    theirs = {"x": Domain("ray.tune.search.sample"), "y": Domain("mine")}
    found = [draw(theirs, 0, trial) for trial in range(3)]
    assert found == [{**draw(theirs, 0, t), "y": theirs["y"]} for t in range(3)]
    assert {type(one["x"]) for one in found} == {float}
    assert len({one["x"] for one in found}) == 3


def test_a_trial_gets_one_of_the_gpus_that_this_process_may_use() -> None:
    assert [visible_gpu(n, None) for n in (0, 1)] == ["0", "1"]
    assert [visible_gpu(n, "5, GPU-7") for n in (0, 1)] == ["5", "GPU-7"]


def test_more_gpus_than_there_are_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(EngineError, match=r"\b3\b.*\b2\b"):
        DistributedTuner(returns(), {"x": 1}, num_gpus=3).tune(1)


@pytest.mark.parametrize(
    ("losses", "said", "reason"),
    [
        ([math.nan, math.inf], "", "a finite loss: all that were reported are inf or"),
        ([-math.inf], "", "a finite loss: all that were reported are inf or nan"),
        ([math.nan], "ValueError: no", "a finite loss: ValueError: no"),
        ([], "ValueError: no", "a loss: ValueError: no"),
        ([], "", r"a loss: train_fn called no report\(\) and returned no number"),
        (None, "", "a loss: the cost cap leaves room for none"),
    ],
)
def test_why_no_trial_is_the_best(
    losses: list[float] | None, said: str, reason: str
) -> None:
    given: dict[str, Any] = {"slot_cost_per_hour": 1.0, "folder": None}
    search = Tuning({}, 0, 2, max_cost=0.0 if losses is None else None, **given)
    for _ in range(2):
        number = search.begin()
        for loss in losses or ():
            search.reported(number or 0, loss)
        if number is not None:
            search.end(number, "done", said if number else "")
    with pytest.raises(EngineError, match=f"^no trial .*{reason}"):
        search.best()


def test_without_ray_its_backend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    tuner = DistributedTuner(len, {}, backend="ray")
    with pytest.raises(EngineError, match=r"\bray\b") as line:
        tuner.tune(1)
    assert "\n" not in str(line.value)
    assert tuner.trials == []  # and nothing else has run them instead


def test_a_report_keeps_the_state_before_it_is_sent(tmp_path: Path) -> None:
    kept, sent = tmp_path / "trial-0.state", []
    report = LossReport(lambda losses: sent.append([*losses]), {"x": 1}, kept)
    assert report.state is None
    report(3.0)
    assert not kept.exists()  # there is no state to go on from
    report(2.0, {"epoch": 2})

    def fails(losses: list[float]) -> None:
        raise BrokenPipeError

    again = LossReport(fails, {"x": 1}, kept)
    assert (again.state, again.losses) == ({"epoch": 2}, [3.0, 2.0])
    with pytest.raises(BrokenPipeError):  # the search was killed at this moment
        again(1.0, {"epoch": 3})
    assert LossReport(fails, {"x": 1}, kept).losses == [3.0, 2.0, 1.0]
    assert [*tmp_path.iterdir()] == [kept]
    assert sent == [[3.0], [3.0, 2.0]]


def test_seconds_and_losses_of_a_continued_trial_count(tmp_path: Path) -> None:
    given: dict[str, Any] = {"slot_cost_per_hour": 3600.0, "max_cost": 50.0}
    kept = tmp_path / "trial-0.state"
    head = {"parameters": {"x": 1}, "losses": [0.5, 4.0], "seconds": 100.0}
    kept.write_bytes(json.dumps(head).encode() + b"\n" + pickle.dumps("state"))
    capped = Tuning({"x": 1}, 0, 2, folder=tmp_path, **given)
    assert capped.begin() == 0
    assert capped.cost >= 100.0
    assert capped.begin() is None
    assert capped.reported(0, 3.0) == 3
    capped.end(0, "done")
    assert (capped.best().loss, capped.best().num_reports) == (0.5, 3)
    assert capped.best().seconds >= 100.0
    assert not kept.exists()
    kept.write_bytes(json.dumps({**head, "parameters": {"x": 2}}).encode() + b"\n")
    with pytest.raises(EngineError, match="another search"):
        Tuning({"x": 1}, 0, 1, folder=tmp_path, **given)
    for content in (b"", b"{}\n", json.dumps(head).encode() + b"\ntorn"):
        kept.write_bytes(content)
        with pytest.raises(EngineError, match=r"trial-0\.state"):
            LossReport(lambda losses: None, {"x": 1}, kept)
    for name in ("trial-0.state", "trials.jsonl"):  # on a disk that isn't mounted
        path = tmp_path / name
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "not mounted")
        with pytest.raises(EngineError, match=re.escape(name)):
            Tuning({"x": 1}, 0, 1, folder=tmp_path, **given)
        path.unlink()


# Inner functions travel by value: their processes need not import this module.


def parabola() -> Callable[..., None]:
    def train_fn(parameters: dict[str, Any], report: Callable[[float], None]) -> None:
        for step in range(1, 10):
            report((parameters["x"] - 1) ** 2 + 1 / step)

    return train_fn


def returns() -> Callable[..., float]:
    return lambda parameters, report: float(parameters["x"])


def raises() -> Callable[..., None]:
    def train_fn(parameters: dict[str, Any], report: Callable[[float], None]) -> None:
        raise RuntimeError("no data here")

    return train_fn


@pytest.mark.slow
def test_the_best_trial_wins_and_poor_ones_end_early(tmp_path: Path) -> None:
    space = {"x": uniform(-3, 3)}
    given: dict[str, Any] = {"num_gpus": 2, "folder": tmp_path}
    tuner = DistributedTuner(parabola(), space, **given)
    best = tuner.tune(8)
    drawn = [draw(space, 0, trial) for trial in range(8)]
    assert best == min(drawn, key=lambda one: (one["x"] - 1) ** 2)
    statuses = {one.status for one in tuner.trials}
    assert statuses == {"done", "stopped"}
    assert sum(one.num_reports for one in tuner.trials) < 8 * 9

    # As if the process had been killed while it wrote the last line.
    path = tmp_path / "trials.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:5], lines[5][:9]]))
    again = DistributedTuner(parabola(), space, **given)
    assert again.tune(8) == best
    assert sorted(one.number for one in again.trials) == [*range(8)]
    kept = [json.loads(line)["seconds"] for line in lines[1:5]]
    assert {*kept} <= {one.seconds for one in again.trials}  # those did not run again
    with pytest.raises(EngineError, match="another search"):
        DistributedTuner(parabola(), space, seed=1, folder=tmp_path).tune(8)


@pytest.mark.slow
def test_a_trial_goes_on_from_the_state_that_a_killed_search_left(
    tmp_path: Path,
) -> None:
    def train_fn(parameters: dict[str, Any], report: Any) -> None:
        epoch = report.state or 0
        while epoch < 4:
            epoch += 1
            report(10.0 * epoch, epoch)

    # As it is left where the process was killed in the third epoch of this trial.
    left = LossReport(lambda losses: None, {"x": 1}, tmp_path / "trial-1.state")
    left(7.0, 1)
    left(5.0, 2)
    given: dict[str, Any] = {"folder": tmp_path, "scheduler": Asha(grace=9)}
    tuner = DistributedTuner(train_fn, {"x": 1}, **given)
    tuner.tune(2)
    reports = [(one.number, one.num_reports, one.loss) for one in tuner.trials]
    assert reports == [(0, 4, 10.0), (1, 4, 5.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["trials.jsonl"]


@pytest.mark.slow
def test_a_cost_cap_and_a_failure() -> None:
    capped = DistributedTuner(
        returns(), {"x": [2, 3]}, cost_per_gpu_hour=3600.0, max_cost=1e-9
    )
    assert capped.tune(5) in ({"x": 2}, {"x": 3})
    assert len(capped.trials) == 1
    with pytest.raises(EngineError, match=r"RuntimeError: no data here"):
        DistributedTuner(raises(), {}).tune(1)
