"""DeepSpeed with two real processes, beside torch's DDP; `make test-deepspeed`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distlab.data.digits import load_digits_split
from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.deepspeed_trainer import DeepSpeedTrainer
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks

pytest.importorskip("deepspeed", reason="`make test-deepspeed` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, BAR = 20, 1e-5
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 0, microbatches, clipped": {
        "zero_stage": 0,
        "gradient_accumulation_steps": 2,
        "batch_size": 4,
        "gradient_clipping": 0.5,
    },
    "stage 2, microbatches, clipped": {
        "zero_stage": 2,
        "gradient_accumulation_steps": 2,
        "batch_size": 4,
        "gradient_clipping": 0.5,
    },
}


def digits() -> DataLoader[Any]:
    split = load_digits_split()
    inputs, targets = split.train_inputs[:160].float(), split.train_targets[:160]
    return DataLoader(TensorDataset(inputs, targets), 16, shuffle=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twenty_steps_are_those_of_torch_ddp(case: dict[str, Any]) -> None:
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2, **case}
    stage = given.pop("zero_stage")
    make: dict[str, Any] = {"optimizer": ranks.momentum, "verbose": False}
    own, other = make_mlp().float(), make_mlp().float()
    expected = PyTorchDDPTrainer(own, **make, **given).fit(digits(), max_steps=STEPS)
    trainer = DeepSpeedTrainer(other, **make, **given, zero_stage=stage)
    found = trainer.fit(digits(), max_steps=STEPS)
    assert (found.backend, found.num_gpus) == ("deepspeed", 2)
    worst = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    pairs = zip(own.parameters(), other.parameters(), strict=True)
    weights = max(float((a - b).detach().abs().max()) for a, b in pairs)
    norms = zip(found.epochs, expected.epochs, strict=True)
    norm = max(abs(a.grad_norm - b.grad_norm) for a, b in norms)
    print(f"largest difference to DDP: loss {worst:.1e}, weights {weights:.1e}")
    assert max(worst, weights, norm) <= BAR


def test_a_configuration_given_once_is_that_of_the_fields(tmp_path: Path) -> None:
    path, steps = tmp_path / "ds.json", 6
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 5}
    more = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {**warm_up, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "steps_per_print": 1000,
    }
    path.write_text(json.dumps(more))
    own, other = make_mlp().float(), make_mlp().float()
    given: dict[str, Any] = {"num_gpus": 2, "epochs": 2, "verbose": False}
    once = PyTorchDDPTrainer(own, deepspeed_config=path, **given)
    found = once.fit(digits(), max_steps=steps)
    trainer = PyTorchDDPTrainer(
        other,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=partial(
            torch.optim.lr_scheduler.LambdaLR,
            lr_lambda=lambda n: min(1.0, max(0, n - 1) / 5),
        ),
        scheduler_interval="step",
        batch_size=8,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        **given,
    )
    expected = trainer.fit(digits(), max_steps=steps)
    assert found.backend == "deepspeed"
    assert found.losses == pytest.approx(expected.losses, abs=BAR)
    rates = [[row.learning_rate for row in one.epochs] for one in (found, expected)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_model_of_float64_is_refused() -> None:
    double = DeepSpeedTrainer(make_mlp().double(), verbose=False)
    with pytest.raises(EngineError, match="float32"):
        double.fit(digits())


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is wrong")


def test_a_failure_is_one_line() -> None:
    trainer = DeepSpeedTrainer(make_mlp().float(), loss=failing, num_gpus=2)
    with pytest.raises(EngineError, match=r"rank \d .*RuntimeError: the loss is wrong"):
        trainer.fit(digits())
