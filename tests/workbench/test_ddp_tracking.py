"""`distlab ddp --track mlflow`: one run with all of it, or one sentence before it.

Where MLflow is missing, most of this is skipped; `make test-tracking` brings it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.monitor.extras import INSTALL
from distlab.training import ddp_tracking
from distlab.training.ddp import Beside, DdpResult, EpochRow
from distlab.training.ddp_config import Wishes, make_config
from tests.workbench.course import Course

HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None
MUST = bool(os.environ.get("DISTLAB_TEST_TRACKING"))  # then missing is a failure
needs_mlflow = pytest.mark.skipif(
    not HAS_MLFLOW and not MUST,
    reason=f"MLflow is not installed: {INSTALL}, or make test-tracking",
)
# MLflow's own affairs, and those of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

READ = """
import json, mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
client = mlflow.MlflowClient()
print(json.dumps([
    {
        "experiment": mlflow.get_experiment(run.info.experiment_id).name,
        "status": run.info.status,
        "params": run.data.params,
        "metrics": run.data.metrics,
        "tags": run.data.tags,
        "steps": [
            [point.step, point.value]
            for point in client.get_metric_history(run.info.run_id, "accuracy")
        ],
        "live": [
            point.step
            for point in client.get_metric_history(run.info.run_id, "step/loss")
        ],
        "files": [
            file.path for file in client.list_artifacts(run.info.run_id, "model")
        ],
    }
    for run in runs
]))
"""
INSIDE_A_RUN = """
import sys
import mlflow
from distlab.cli.app import main

if __name__ == "__main__":
    mlflow.set_tracking_uri(sys.argv[1])
    mlflow.set_experiment("mine")
    with mlflow.start_run():
        mlflow.log_param("before", 1)
        sys.argv = ["distlab", "ddp", "--epochs", "1", "--track", "mlflow"]
        try:
            main()
        except SystemExit as done:
            code = done.code
    sys.exit(code)
"""


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def made_up() -> DdpResult:
    row = EpochRow(
        train_loss=0.5, loss=0.4, accuracy=0.9, seconds=2.0, throughput=100.0
    )
    config = make_config(Wishes(epochs=2, batch_size=10), num_gpus=0)
    weights = torch.arange(6.0)
    return DdpResult(
        config=config,
        epochs=(row, row),
        accuracies=(0.9, 0.9),
        losses=((0.5,), (0.5,)),
        weights=(weights, weights),
        first_weights=weights,
        seconds=36.0,
        communication=0.25,
        data_wait=0.05,
        step_bytes=48.0,
        num_steps=46,
        shards=(),
    )


def test_parameters_say_how_to_repeat_it() -> None:
    found = ddp_tracking.parameters(made_up(), rate=2.0)
    assert {
        "world_size", "batch_size", "global_batch_size", "learning_rate", "lr_scaling",
        "optimizer", "momentum", "weight_decay", "epochs", "dataset", "code", "seed",
        "device", "backend", "host", "torch", "cost_per_worker_hour",
    } <= set(found)  # fmt: skip
    assert (found["batch_size"], found["global_batch_size"]) == (10, 20)
    assert found["backend"] == "gloo"


def test_cost_is_per_worker_times_workers() -> None:
    found = ddp_tracking.metrics(made_up(), rate=2.0, beside=None)
    assert found["cost_per_worker"] == pytest.approx(0.02)  # 36 s are 0.01 h
    assert found["cost"] == pytest.approx(0.04)
    assert found["communication_share"] == 0.25
    assert "speedup" not in found
    beside = Beside(first_difference=0, difference=0, speedup=0.5, tolerance=None)
    assert ddp_tracking.metrics(made_up(), 2.0, beside)["speedup"] == 0.5


def test_where_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "state"
    assert ddp_tracking.store_uri(folder) == f"sqlite:///{folder}/mlflow.db"
    assert folder.is_dir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    assert ddp_tracking.store_uri(folder) == "sqlite:///elsewhere.db"


def test_without_mlflow_one_sentence_and_no_training(course: Course) -> None:
    blocked = "import sys; sys.modules['mlflow'] = None; sys.argv = sys.argv[1:]; "
    code = f"{blocked}from distlab.cli.app import main; main()"
    done = course.python("-c", code, "distlab", "ddp", "--track", "mlflow")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("distlab: --track mlflow ")
    assert done.err.endswith("pip install -e '.[tracking]'\n")
    assert not course.state.exists()


def runs_in(uri: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, uri],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@needs_mlflow
def test_one_run_holds_all_of_it(course: Course) -> None:
    flags = ("--epochs", "2", "--compare", "--cost-per-worker-hour", "2.5")
    done = course.distlab("ddp", "--track", "mlflow", *flags)
    assert (done.code, done.err) == (0, "")
    uri = f"sqlite:///{course.state / 'mlflow.db'}"
    assert f"  mlflow ui --backend-store-uri {shlex.quote(uri)}\n" in done.out
    (run,) = runs_in(uri)  # one, not one for each rank
    assert (run["experiment"], run["status"]) == ("digits-training", "FINISHED")
    assert run["params"]["world_size"] == "2"
    assert run["params"]["code"] == "reference"
    assert run["params"]["cost_per_worker_hour"] == "2.5"
    assert [step for step, _ in run["steps"]] == [1, 2]
    metrics = run["metrics"]
    assert metrics["final_accuracy"] == metrics["accuracy"] == run["steps"][-1][1]
    assert metrics["cost"] == pytest.approx(2 * metrics["cost_per_worker"])
    assert {"loss", "train_loss", "seconds", "throughput", "speedup"} <= set(metrics)
    assert 0 < metrics["communication_share"] < 1
    assert run["tags"]["digest"] in done.out

    done = course.distlab("ddp", "--track", "mlflow", "--json", "--epochs", "1")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["mlflow"]["uri"] == uri
    assert len(runs_in(uri)) == 2


@needs_mlflow
def test_steps_and_the_model_are_in_the_same_run(
    course: Course, tmp_path: Path
) -> None:
    flags = ("--monitor", str(tmp_path / "run"), "--save", str(tmp_path / "model.pt"))
    done = course.distlab("ddp", "--track", "mlflow", "--epochs", "1", *flags)
    assert (done.code, done.err) == (0, "")
    (run,) = runs_in(f"sqlite:///{course.state / 'mlflow.db'}")
    assert run["live"] == [10, 20, 23]
    assert run["files"] == ["model/model.pt"]


@needs_mlflow
def test_an_active_run_is_used(course: Course, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INSIDE_A_RUN)
    uri = f"sqlite:///{tmp_path}/own.db"
    done = course.python("-W", "ignore", str(script), uri)
    assert done.code == 0
    assert f"mlflow ui --backend-store-uri {uri}" in done.out
    (run,) = runs_in(uri)
    assert run["experiment"] == "mine"
    assert run["params"]["before"] == "1"
    assert run["params"]["dataset"] == "digits"
    assert not (course.state / "mlflow.db").exists()


@needs_mlflow
@pytest.mark.parametrize(
    "uri", ["sqlite:////proc/nowhere/all.db", "what://ever", "http://127.0.0.1:9"]
)
def test_a_store_that_cannot_be_used(course: Course, uri: str) -> None:
    done = course.distlab("ddp", "--track", "mlflow", MLFLOW_TRACKING_URI=uri)
    assert (done.code, done.out) == (2, "")
    assert f" {uri}: " in done.err
    assert "Traceback" not in done.err
