"""Ray Train with two real workers, beside torch's DDP; `make test-ray`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _engine_ranks as ranks
from distlab.cli.train_verb import train
from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.ray_engine import RayTrainer
from distlab.models.mlp import make_mlp

pytest.importorskip("ray", reason="`make test-ray` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 20


def test_twenty_steps_are_those_of_torch_ddp() -> None:
    loader, val = ranks.loaders()
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2}
    own, other = make_mlp(), make_mlp()
    ddp = PyTorchDDPTrainer(own, optimizer=ranks.sgd, verbose=False, **given)
    expected = ddp.fit(loader, val, max_steps=STEPS)
    ray = RayTrainer(other, given, optimizer=ranks.sgd, verbose=False)
    found = ray.fit(loader, val, max_steps=STEPS)
    assert (found.backend, found.num_gpus, len(found.losses)) == ("ray", 2, STEPS)
    worst = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    weights = max(
        float((a - b).detach().abs().max())
        for a, b in zip(own.parameters(), other.parameters(), strict=True)
    )
    print(f"largest difference to DDP: loss {worst:.1e}, weights {weights:.1e}")
    assert worst <= 1e-10
    assert weights <= 1e-10
    assert ray.best_accuracy == expected.best_accuracy


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


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is wrong")


def test_a_failure_and_an_address_without_a_cluster_are_one_line() -> None:
    loader, _ = ranks.loaders()
    with pytest.raises(EngineError, match="no Ray cluster answers at ray://127"):
        RayTrainer(make_mlp(), address="ray://127.0.0.1:1").fit(loader)
    broken = RayTrainer(make_mlp(), {"num_gpus": 2}, loss=failing)
    with pytest.raises(EngineError, match="the loss is wrong") as caught:
        broken.fit(loader)
    assert "\n" not in str(caught.value)
