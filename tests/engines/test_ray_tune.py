"""Ray Tune with two real workers, beside our own processes; `make test-ray`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.engines import Asha, DistributedTuner, EngineError, loguniform, uniform
from distlab.engines.ray_engine import joined

ray = pytest.importorskip("ray", reason="`make test-ray` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TRIALS, NUM_WORKERS = 8, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with joined(ray, None, NUM_WORKERS):
        yield


# Inner functions travel by value: their processes need not import this module.


def on_digits(folder: Path) -> Callable[..., None]:
    """Trains on some digits; the first two trials wait until both of them run."""

    def train_fn(parameters: dict[str, Any], report: Callable[..., None]) -> None:
        import os
        import time

        import torch

        from distlab.data.digits import load_digits_split

        own = folder / f"{parameters['lr']!r}"
        own.write_text(str(os.getpid()))
        deadline = time.monotonic() + 300
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < deadline, "no other trial runs beside this one"
            time.sleep(0.05)
        torch.set_num_threads(1)
        digits = load_digits_split()
        inputs, targets = digits.train_inputs[:64], digits.train_targets[:64]
        model = torch.nn.Linear(inputs.shape[1], 10).double()  # no seed is set here
        optimizer = torch.optim.SGD(model.parameters(), lr=parameters["lr"])
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(float(loss))

    return train_fn


def parabola() -> Callable[..., None]:
    def train_fn(parameters: dict[str, Any], report: Callable[..., None]) -> None:
        for step in range(1, 10):
            report((parameters["x"] - 1) ** 2 + 1 / step)

    return train_fn


def raises() -> Callable[..., None]:
    def train_fn(parameters: dict[str, Any], report: Callable[..., None]) -> None:
        raise RuntimeError("no data here")

    return train_fn


def test_eight_trials_over_two_workers_have_the_scores_of_processes(
    tmp_path: Path, cluster: None
) -> None:
    by_backend, best, pids = {}, {}, {}
    for backend in ("processes", "ray"):
        folder = tmp_path / backend
        folder.mkdir()
        tuner = DistributedTuner(
            on_digits(folder),
            {"lr": loguniform(1e-3, 1.0)},
            num_gpus=NUM_WORKERS,
            backend=backend,
            scheduler=Asha(grace=100),
        )
        best[backend] = tuner.tune(NUM_TRIALS)
        by_backend[backend] = {
            one.number: (one.parameters, one.loss, one.num_reports, one.status)
            for one in tuner.trials
        }
        pids[backend] = {path.read_text() for path in folder.iterdir()}
    assert by_backend["ray"] == by_backend["processes"]
    assert best["ray"] == best["processes"]
    assert sorted(by_backend["ray"]) == [*range(NUM_TRIALS)]
    assert {one[2:] for one in by_backend["ray"].values()} == {(3, "done")}
    assert len(pids["ray"]) == NUM_TRIALS  # each in a process that ran no other


def test_poor_trials_end_by_rays_asha(cluster: None) -> None:
    # One at a time, so that what a trial is compared with is known.
    space = {"x": uniform(-3, 3)}
    tuner = DistributedTuner(parabola(), space, backend="ray", seed=8)
    best = tuner.tune(3)
    assert [one.number for one in tuner.trials] == [0, 1, 2]
    assert [one.num_reports for one in tuner.trials] == [9, 1, 9]
    assert [one.status for one in tuner.trials] == ["done", "stopped", "done"]
    assert best == tuner.trials[2].parameters


def test_a_cost_cap_and_a_failure(cluster: None) -> None:
    given: dict[str, Any] = {"backend": "ray", "cost_per_gpu_hour": 3600.0}
    capped = DistributedTuner(parabola(), {"x": [2, 3]}, max_cost=1e-9, **given)
    assert capped.tune(5) in ({"x": 2}, {"x": 3})
    assert [(one.num_reports, one.status) for one in capped.trials] == [(1, "stopped")]
    assert capped.cost >= 1e-9
    with pytest.raises(EngineError, match="RuntimeError: no data here") as caught:
        DistributedTuner(raises(), {}, backend="ray").tune(1)
    assert "\n" not in str(caught.value)
