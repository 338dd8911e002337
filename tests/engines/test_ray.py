"""Ray Train with two real workers, beside torch's DDP; `make test-ray`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.train_verb import train
from distlab.engines import EngineError, PyTorchDDPTrainer, RayTrainer
from distlab.engines.ray_strategy import joined
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks
from tests.corpora import outside_engines as outside

ray: Any = pytest.importorskip("ray", reason="`make test-ray` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_twenty_steps_are_those_of_torch_ddp() -> None:
    gaps = outside.ENGINES["ray"].gaps()
    print(
        f"largest difference to DDP: loss {gaps.loss:.1e}, weights {gaps.weights:.1e}"
    )
    assert max(gaps.loss, gaps.weights) <= outside.ENGINES["ray"].bar
    assert gaps.accuracy == 0.0


SCRIPT = """
import os, sys, torch.distributed as dist
from pathlib import Path
assert dist.get_world_size() == 2
Path(sys.argv[1], os.environ["RANK"]).touch()
"""


def test_distlab_train_runs_a_script_on_ray(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert train(script, [str(tmp_path)], backend="ray", num_gpus=2) == 0
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


TRAINERS = """
import json, os, sys
from pathlib import Path
from tests.corpora import engine_ranks as ranks
from distlab.engines import PyTorchDDPTrainer, RayTrainer
from distlab.models.mlp import make_mlp

found = []
for kind in (RayTrainer, PyTorchDDPTrainer):
    trainer = kind(make_mlp(), optimizer=ranks.sgd, verbose=False, batch_size=8)
    history = trainer.fit(ranks.loaders(64)[0], epochs=1)
    found.append((history.backend, history.num_gpus, history.losses))
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
"""


def test_trainers_in_a_script_take_part_in_its_job_on_ray(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINERS)
    assert train(script, [str(tmp_path)], backend="ray", num_gpus=2) == 0
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    given: dict[str, Any] = {"num_gpus": 2, "batch_size": 8, "verbose": False}
    ddp = PyTorchDDPTrainer(make_mlp(), optimizer=ranks.sgd, **given)
    losses = ddp.fit(ranks.loaders(64)[0]).losses
    assert first == second
    for backend, num_gpus, own in first:
        assert (backend, num_gpus) == ("ray", 2)
        assert own == pytest.approx(losses, abs=1e-10)


def test_a_configuration_of_tune_run_goes_to_the_trainer() -> None:
    from ray import tune

    def train_fn(config: dict[str, Any]) -> dict[str, Any]:
        from distlab.engines import RayTrainer
        from distlab.models.mlp import make_mlp
        from tests.corpora import engine_ranks as ranks

        trainer = RayTrainer(make_mlp(), config, optimizer=ranks.sgd, verbose=False)
        history = trainer.fit(*ranks.loaders(64))
        assert trainer.best_accuracy == history.best_accuracy
        rates = [row.learning_rate for row in history.epochs]
        return {"loss": history.losses[-1], "rate": rates[0], "n": history.num_gpus}

    rates = [0.05, 0.2]
    space = {"learning_rate": tune.grid_search(rates), "num_gpus": 2, "batch_size": 8}
    with joined(ray, None, 4):
        found = tune.run(train_fn, config=space, max_concurrent_trials=1, verbose=0)
    results = [trial.last_result for trial in found.trials]
    assert sorted(one["rate"] for one in results) == rates
    assert {one["n"] for one in results} == {2}
    assert len({one["loss"] for one in results}) == 2


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is wrong")


def test_a_failure_and_an_address_without_a_cluster_are_one_line() -> None:
    loader, _ = ranks.loaders()
    with pytest.raises(EngineError, match="ray://127"):
        RayTrainer(make_mlp(), address="ray://127.0.0.1:1").fit(loader)
    broken = RayTrainer(make_mlp(), {"num_gpus": 2}, loss=failing)
    with pytest.raises(EngineError, match="the loss is wrong") as caught:
        broken.fit(loader)
    assert "\n" not in str(caught.value)
