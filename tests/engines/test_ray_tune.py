"""Ray Tune with two real workers, beside our own processes; `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.engines import Asha, DistributedTuner, EngineError, loguniform, uniform
from distlab.engines.ray_strategy import joined
from distlab.engines.search import draw

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
        torch.manual_seed(0)
        model = torch.nn.Linear(inputs.shape[1], 10).double()
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


SEARCH = """
import os, sys, time
from pathlib import Path
from distlab.engines import Asha, DistributedTuner, loguniform
from distlab.engines.search import draw

backend, folder, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
space = {"lr": loguniform(1e-3, 0.1)}
first = [draw(space, 0, number) for number in range(3)]

def train_fn(parameters, report):
    epoch, weight, velocity = report.state or (0, 3.0, 0.0)
    while epoch < 4:
        with open(log / "epochs", "a") as file:
            print(repr(parameters["lr"]), epoch, file=file, flush=True)
        deadline = time.monotonic() + 600
        while epoch == 2 and parameters not in first and not (log / "go").exists():
            assert time.monotonic() < deadline, "the test has not let it go on"
            time.sleep(0.05)
        velocity = 0.9 * velocity + 2 * weight
        weight -= parameters["lr"] * velocity
        epoch += 1
        report(weight**2, (epoch, weight, velocity))

DistributedTuner(
    train_fn, space, num_gpus=2, backend=backend, scheduler=Asha(grace=9), folder=folder
).tune(8)
"""


def marked(mark: str) -> list[int]:
    """The processes that this test has started, and those that they have."""
    found = []
    for one in Path("/proc").iterdir():
        try:
            if one.name.isdigit() and mark.encode() in (one / "environ").read_bytes():
                found.append(int(one.name))
        except OSError:  # it has ended
            continue
    return found


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def noted(folder: Path) -> dict[int, dict[str, Any]]:
    """What a search has written of its trials."""
    path = folder / "trials.jsonl"
    lines = path.read_text().split("\n") if path.exists() else []
    trials = [json.loads(line) for line in lines if line.endswith("}")]
    assert len({one["number"] for one in trials}) == len(trials)
    return {one["number"]: one for one in trials}


def epochs(log: Path) -> Counter[tuple[float, int]]:
    """How often each trial, named by its learning rate, has begun each epoch."""
    path = log / "epochs"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((float(lr), int(epoch)) for lr, epoch in map(str.split, lines))


@pytest.mark.parametrize("backend", ["ray", "processes"])
def test_a_killed_search_is_resumed(backend: str, tmp_path: Path) -> None:
    rates = [draw({"lr": loguniform(1e-3, 0.1)}, 0, n)["lr"] for n in range(NUM_TRIALS)]
    script, mark = tmp_path / "search.py", uuid.uuid4().hex
    script.write_text(SEARCH)
    folders = {name: tmp_path / name for name in ("killed", "whole", "log", "other")}
    for folder in folders.values():
        folder.mkdir()
    log, path = folders["log"], os.pathsep.join(sys.path)
    environment = {**os.environ, "DISTLAB_TEST_MARK": mark, "PYTHONPATH": path}

    def start(backend: str, folder: str, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, script, backend, folders[folder], log]
        return subprocess.Popen([*map(str, command)], env=environment)

    def is_held() -> bool:
        assert search.poll() is None, "the search has ended"
        held = sum(epochs(log)[rate, 2] for rate in rates[3:])
        return held == NUM_WORKERS and len(noted(folders["killed"])) == 3

    search = start(backend, "killed", log)
    try:
        assert wait_until(is_held, 1200)
        before = noted(folders["killed"])
        assert sorted(before) == [0, 1, 2]
        os.kill(search.pid, signal.SIGKILL)
        search.wait()
        assert wait_until(lambda: not marked(mark), 120), marked(mark)

        (log / "go").touch()
        search = start(backend, "killed", log)
        assert search.wait() == 0
        after = noted(folders["killed"])
        assert {number: after[number] for number in before} == before
        # Each epoch once; the two that were held had begun their third before.
        expected = Counter((rate, epoch) for rate in rates for epoch in range(4))
        expected.update([(rate, 2) for rate in rates[3:5]])
        assert epochs(log) == expected
        assert not [*folders["killed"].glob("trial-*")]

        (folders["other"] / "go").touch()
        search = start("processes", "whole", folders["other"])
        assert search.wait() == 0
        unbroken = noted(folders["whole"])
        assert sorted(after) == sorted(unbroken) == [*range(NUM_TRIALS)]
        for field in ("parameters", "loss", "num_reports", "status"):
            for number, one in unbroken.items():
                assert after[number][field] == one[field]
        assert {one["num_reports"] for one in after.values()} == {4}
        assert wait_until(lambda: not marked(mark), 120), marked(mark)
    finally:
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        search.wait()
