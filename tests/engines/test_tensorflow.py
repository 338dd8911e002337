"""TensorFlow with two real processes, beside torch's DDP; `make test-tensorflow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _engine_ranks as ranks
from distlab.engines import PyTorchDDPTrainer
from distlab.engines.tensorflow_engine import TensorFlowDistributedTrainer
from distlab.models.mlp import make_mlp

tf: Any = pytest.importorskip("tensorflow", reason="`make test-tensorflow` installs it")
keras: Any = pytest.importorskip("keras")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, BAR = 20, 1e-5
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"gradient_accumulation_steps": 3, "batch_size": 2},
    "clipped": {"gradient_clipping": 0.01},
    "warm-up": {"warmup_epochs": 1.5, "lr_scaling": "sqrt"},
}


def same_model(torch_model: torch.nn.Module, momentum: float = 0.9) -> Any:
    """The network of `make_mlp` in Keras, with its weights."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )
    arrays = [p.detach().float().numpy() for p in torch_model.parameters()]
    model.set_weights([a.T if a.ndim == 2 else a for a in arrays])
    model.compile(
        optimizer=keras.optimizers.SGD(ranks.LEARNING_RATE / 4, momentum=momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def dataset(loader: Any) -> Any:
    inputs, targets = loader.dataset.tensors
    arrays = inputs.float().numpy(), targets.numpy()
    return tf.data.Dataset.from_tensor_slices(arrays).batch(loader.batch_size)


def largest(own: torch.nn.Module, other: Any) -> float:
    pairs = zip(own.parameters(), other.get_weights(), strict=True)
    return max(
        float((a.detach().float() - torch.tensor(b.T)).abs().max()) for a, b in pairs
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twenty_steps_are_those_of_torch_ddp(case: dict[str, Any]) -> None:
    loader, val = ranks.loaders()
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2, **case}
    own = make_mlp()
    other = same_model(own)
    ddp = PyTorchDDPTrainer(own, optimizer=ranks.momentum, verbose=False, **given)
    expected = ddp.fit(loader, val, max_steps=STEPS)
    trainer = TensorFlowDistributedTrainer(other, verbose=False, **given)
    found = trainer.fit(dataset(loader), dataset(val), max_steps=STEPS)
    assert (found.backend, found.num_gpus) == ("tensorflow", 2)
    worst = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    weights = largest(own, other)
    print(f"largest difference to DDP: loss {worst:.1e}, weights {weights:.1e}")
    assert max(worst, weights) <= BAR
    for row, its in zip(found.epochs, expected.epochs, strict=True):
        assert row.grad_norm == pytest.approx(its.grad_norm, abs=BAR)
        assert row.learning_rate == pytest.approx(its.learning_rate)
        assert row.val_loss == pytest.approx(its.val_loss, abs=BAR)
        assert row.accuracy == pytest.approx(its.accuracy, abs=0.01)
