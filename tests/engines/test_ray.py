"""Ray Train with two real workers, beside torch's DDP; `make test-ray`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import _engine_ranks as ranks
from benchmarks import _outside_engines as outside
from distlab.cli.train_verb import train
from distlab.engines import EngineError, RayTrainer
from distlab.models.mlp import make_mlp

pytest.importorskip("ray", reason="`make test-ray` installs it")
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
