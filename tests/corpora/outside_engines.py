"""Engines in an environment of their own, beside torch's DDP on the same digits.

Two real processes each, SGD, 20 steps. Ray and Horovod compute in float64. DeepSpeed
and Keras compute in float32, so their bars are wider.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from distlab.data.digits import load_digits_split
from distlab.engines import PyTorchDDPTrainer
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks

STEPS = 20
GIVEN: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2}
KERAS_RATE = ranks.LEARNING_RATE / 4


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """The largest differences to DDP: a step's loss, a weight, the accuracy."""

    loss: float
    weights: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine: the module that it needs, how to get it, and its comparison."""

    module: str
    target: str  # of make
    bar: float  # of the losses and weights
    gaps: Callable[[], Gaps]

    @property
    def is_here(self) -> bool:
        """Whether this environment has it; nothing is imported."""
        return importlib.util.find_spec(self.module) is not None


def ray() -> Gaps:
    """Ray Train."""
    from distlab.engines import RayTrainer

    model = make_mlp()
    trainer = RayTrainer(model, dict(GIVEN), optimizer=ranks.sgd, verbose=False)
    return _beside_ddp(trainer, model, *ranks.loaders())


def horovod() -> Gaps:
    """Horovod's ring."""
    from distlab.engines import HorovodTrainer

    model = make_mlp()
    trainer = HorovodTrainer(model, ranks.sgd, verbose=False, **GIVEN)
    return _beside_ddp(trainer, model, *ranks.loaders())


def deepspeed() -> Gaps:
    """DeepSpeed's ZeRO stage 2, in float32."""
    from distlab.engines.deepspeed_trainer import DeepSpeedTrainer

    model = make_mlp().float()
    trainer = DeepSpeedTrainer(
        model, optimizer=ranks.sgd, verbose=False, zero_stage=2, **GIVEN
    )
    return _beside_ddp(trainer, model, *float32_loaders())


def tensorflow() -> Gaps:
    """Keras under MultiWorkerMirroredStrategy, in float32."""
    from distlab.engines.tensorflow_trainer import TensorFlowDistributedTrainer

    own = make_mlp()
    other = keras_mlp(own)
    loader, val = ranks.loaders()
    ddp = PyTorchDDPTrainer(own, optimizer=_keras_sgd, verbose=False, **GIVEN)
    expected = ddp.fit(loader, val, max_steps=STEPS)
    trainer = TensorFlowDistributedTrainer(other, verbose=False, **GIVEN)
    found = trainer.fit(keras_data(loader), keras_data(val), max_steps=STEPS)
    return _gaps(found, expected, largest_to_keras(own, other))


ENGINES = {
    "ray": Engine(module="ray", target="test-ray", bar=1e-10, gaps=ray),
    "horovod": Engine(module="horovod", target="test-horovod", bar=1e-10, gaps=horovod),
    "deepspeed": Engine(
        module="deepspeed", target="test-deepspeed", bar=1e-5, gaps=deepspeed
    ),
    "tensorflow": Engine(
        module="tensorflow", target="test-tensorflow", bar=1e-5, gaps=tensorflow
    ),
}


def float32_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Digits in float32: 160 to train on, so that all batches are full."""
    digits = load_digits_split()
    train = TensorDataset(digits.train_inputs[:160].float(), digits.train_targets[:160])
    held_out = TensorDataset(digits.held_out_inputs.float(), digits.held_out_targets)
    return DataLoader(train, ranks.BATCH, shuffle=True), DataLoader(held_out, 50)


def keras_mlp(
    torch_model: torch.nn.Module,
    dtype: str = "float32",
    momentum: float = 0.0,
    rate: float = KERAS_RATE,
) -> Any:
    """The network of `make_mlp` in Keras, with its weights, compiled with SGD."""
    from distlab.engines.tensorflow_start import keras

    k = keras()
    layers = k.layers
    model = k.Sequential(
        [
            k.Input((64,), dtype=dtype),
            layers.Dense(64, activation="relu", dtype=dtype),
            layers.Dense(10, dtype=dtype),
        ]
    )
    arrays = [p.detach().numpy().astype(dtype) for p in torch_model.parameters()]
    model.set_weights([a.T if a.ndim == 2 else a for a in arrays])
    model.compile(
        optimizer=k.optimizers.SGD(rate, momentum=momentum),
        # set_floatx() would be too late: it has no effect on layers of a process that
        # has made one before.
        loss=k.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype),
    )
    return model


def keras_data(loader: Any, dtype: str = "float32") -> Any:
    """The samples of a loader as a tf.data.Dataset, in batches of the same size."""
    from distlab.engines.tensorflow_start import tensorflow

    inputs, targets = loader.dataset.tensors
    arrays = inputs.numpy().astype(dtype), targets.numpy()
    whole = tensorflow().data.Dataset.from_tensor_slices(arrays)
    return whole.batch(loader.batch_size)


def largest_to_keras(own: torch.nn.Module, other: Any) -> float:
    """The largest difference of a weight."""
    pairs = zip(own.parameters(), other.get_weights(), strict=True)
    return max(
        float((a.detach() - torch.from_numpy(b.T.copy())).abs().max()) for a, b in pairs
    )


def _keras_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=KERAS_RATE)


def _beside_ddp(trainer: Any, model: torch.nn.Module, train: Any, val: Any) -> Gaps:
    own = make_mlp().to(next(model.parameters()).dtype)
    ddp = PyTorchDDPTrainer(own, optimizer=ranks.sgd, verbose=False, **GIVEN)
    expected = ddp.fit(train, val, max_steps=STEPS)
    found = trainer.fit(train, val, max_steps=STEPS)
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    weights = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return _gaps(found, expected, weights)


def _gaps(found: Any, expected: Any, weights: float) -> Gaps:
    assert len(found.losses) == STEPS
    pairs = zip(found.losses, expected.losses, strict=True)
    return Gaps(
        loss=max(abs(one - other) for one, other in pairs),
        weights=weights,
        accuracy=abs(found.best_accuracy - expected.best_accuracy),
    )
