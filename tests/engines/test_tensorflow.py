"""TensorFlow with two real processes, beside torch's DDP; `make test-tensorflow`."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.train_verb import train
from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.tensorflow_trainer import TensorFlowDistributedTrainer
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks
from tests.corpora.outside_engines import keras_data as dataset
from tests.corpora.outside_engines import keras_mlp as same_model
from tests.corpora.outside_engines import largest_to_keras as largest

tf: Any = pytest.importorskip("tensorflow", reason="`make test-tensorflow` installs it")
keras: Any = pytest.importorskip("keras")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, BAR = 20, 1e-5
EXACT_BAR = 1e-13  # of float64, where additions come in another order
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"gradient_accumulation_steps": 3, "batch_size": 2},
    "clipped": {"gradient_clipping": 0.01},
    "warm-up": {"warmup_epochs": 1.5, "lr_scaling": "sqrt"},
}


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=ranks.LEARNING_RATE / 4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twenty_steps_are_those_of_torch_ddp(case: dict[str, Any]) -> None:
    loader, val = ranks.loaders()
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2, **case}
    own = make_mlp()
    # Keras puts the rate into the momentum: with a rate that changes, others result.
    is_plain = "warmup_epochs" in case
    other = same_model(own, momentum=0.0 if is_plain else 0.9)
    make = plain if is_plain else ranks.momentum
    ddp = PyTorchDDPTrainer(own, optimizer=make, verbose=False, **given)
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


def test_float64_is_equal_and_a_checkpoint_is_continued(tmp_path: Path) -> None:
    loader, _ = ranks.loaders(64)
    given: dict[str, Any] = {"batch_size": 8, "num_gpus": 2, "verbose": False}
    # float32 holds neither of these, nor what comes of a model that was made in it.
    given["learning_rate"], momentum = 0.05, 0.9
    own = make_mlp()
    assert {v.dtype for v in same_model(own).variables} == {"float32"}
    models = [same_model(own, "float64", momentum) for _ in range(3)]
    assert all(v.dtype == "float64" for model in models for v in model.variables)
    data = dataset(loader, "float64")

    def fit(model: Any, epochs: int, **more: Any) -> Any:
        trainer = TensorFlowDistributedTrainer(model, epochs=epochs, **given, **more)
        return trainer.fit(data)

    ddp = PyTorchDDPTrainer(own, optimizer=ranks.momentum, epochs=2, **given)
    expected = ddp.fit(loader)
    whole = fit(models[0], 2)
    fit(models[1], 1, checkpoint_dir=tmp_path)
    again = fit(models[2], 2, checkpoint_dir=tmp_path, resume_from_checkpoint=True)
    pairs = zip(whole.losses, expected.losses, strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    weights = largest(own, models[0])
    print(f"largest difference to DDP: loss {worst:.1e}, weights {weights:.1e}")
    assert max(worst, weights) <= EXACT_BAR
    assert again.losses == pytest.approx(whole.losses, abs=EXACT_BAR)
    assert largest(own, models[2]) <= EXACT_BAR
    other = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    other.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    alone = TensorFlowDistributedTrainer(
        other, checkpoint_dir=tmp_path, resume_from_checkpoint=True, epochs=3
    )
    with pytest.raises(EngineError, match="model"):
        alone.fit(data)


SCRIPT = """
import json, os, sys
from pathlib import Path
import keras, numpy as np, tensorflow as tf
from distlab.engines.tensorflow_trainer import TensorFlowDistributedTrainer

assert len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2
folder, seed = Path(sys.argv[1]), json.loads(sys.argv[2])

@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    def __init__(self, **more):
        super().__init__(**more)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3)
    def call(self, x, training=False):
        return self.drop(self.norm(x, training=training), training=training)

model = keras.Sequential([keras.layers.Dense(8), Block(), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss)
inputs = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((inputs, (inputs[:, 0] > 0).astype(int)))
data = data.shuffle(24, seed=seed).batch(4)
trainer = TensorFlowDistributedTrainer(model, epochs=2, verbose=False)
try:
    history = trainer.fit(data, data)
except ValueError as error:
    (folder / os.environ["RANK"]).write_text(str(error))
else:
    said = [history.num_gpus, history.losses, [w.tolist() for w in model.get_weights()]]
    (folder / os.environ["RANK"]).write_text(json.dumps(said))
"""


def on_two_ranks(folder: Path, seed: int | None) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    given: dict[str, Any] = {"backend": "tensorflow", "num_gpus": 2, "log_dir": folder}
    assert train(script, [str(folder), json.dumps(seed)], **given) == 0
    return [(folder / rank).read_text() for rank in "01"]


def test_distlab_train_runs_a_script_whose_ranks_drew_other_weights(
    tmp_path: Path,
) -> None:
    first, second = on_two_ranks(tmp_path, seed=3)
    assert first == second
    num_gpus, losses, weights = json.loads(first)
    assert (num_gpus, len(losses), len(weights)) == (2, 6, 8)
    moving = [w for w in weights if len(w) == 8 and not isinstance(w[0], list)]
    assert any(w not in ([0.0] * 8, [1.0] * 8) for w in moving)


def test_ranks_that_shuffle_without_a_seed_are_refused(tmp_path: Path) -> None:
    for said in on_two_ranks(tmp_path, seed=None):
        assert re.search(r"rank 1 .*rank 0", said)


def failing(targets: Any, outputs: Any) -> Any:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the loss is wrong\nsecond line")
    return keras.losses.sparse_categorical_crossentropy(targets, outputs)


def killed(targets: Any, outputs: Any) -> Any:
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return keras.losses.sparse_categorical_crossentropy(targets, outputs)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (failing, "rank 1 failed: RuntimeError: the loss is wrong"),
        (killed, "rank 0 failed: another rank has ended|did not finish: .*rank 1"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_process(loss: Any, said: str) -> None:
    model = same_model(make_mlp())
    model.compile(optimizer="sgd", loss=loss)
    before = children()
    trainer = TensorFlowDistributedTrainer(model, num_gpus=2, verbose=False)
    with pytest.raises(EngineError, match=said) as caught:
        trainer.fit(dataset(ranks.loaders(32)[0]))
    assert "\n" not in str(caught.value)
    assert children() == before


def children() -> set[str]:
    """The processes that this one has started."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {pid for path in found for pid in path.read_text().split()}


def compiled(**given: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **given})
    return model


class OwnStep(keras.Model):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return {}


def own_step() -> Any:
    inputs = keras.Input((4,))
    model = OwnStep(inputs, keras.layers.Dense(2)(inputs))
    model.compile(optimizer="sgd", loss="mse")
    return model


def scheduled() -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    return compiled(optimizer=keras.optimizers.SGD(schedule))


MODELS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: torch.nn.Linear(2, 2), {}, "model is a Linear, must be a keras.Model"),
    (lambda: compiled(loss=None), {}, "not compiled with an optimizer and a loss"),
    (
        lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        {},
        "reduction='sum': it must be a mean",
    ),
    (scheduled, {}, "the optimizer has a schedule"),
    (own_step, {}, "OwnStep has a train_step of its own"),
    (compiled, {"optimizer": "sgd"}, "optimizer is given: model.compile"),
    (compiled, {"epoch": 1}, "no field 'epoch'; did you mean 'epochs'"),
    (compiled, {"mixed_precision": "bf16"}, "takes the precision from the model"),
    (compiled, {"find_unused_parameters": True}, "backend is tensorflow"),
    (compiled, {"offload_params": True}, "offloading needs backend fsdp2"),
    (compiled, {"deepspeed_config": {}}, "but backend is tensorflow"),
    (compiled, {"backend": "ray"}, "has backends tensorflow, not ray"),
]


@pytest.mark.parametrize(("make", "given", "said"), MODELS, ids=lambda v: str(v)[:30])
def test_a_model_or_a_field_that_does_not_fit_is_one_line(
    make: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        TensorFlowDistributedTrainer(make(), **given)
    assert "\n" not in str(caught.value)


def pairs_of(count: int = 8) -> Any:
    inputs = tf.random.stateless_normal((count, 4), (1, 2))
    return tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :2]))


DATASETS: list[tuple[Any, str]] = [
    (list, "train_dataset is a list, must be a tf.data.Dataset"),
    (lambda: pairs_of().batch(2).repeat(), "train_dataset has no end"),
    (lambda: pairs_of().batch(2).map(lambda x, y: x), "inputs and targets; it has"),
    (lambda: tf.data.Dataset.zip((tf.data.Dataset.range(3),) * 2), "call batch"),
    (lambda: pairs_of().batch(2).take(0), "train_dataset has no samples"),
    (lambda: pairs_of(3).batch(2, drop_remainder=True), "no full step of 1 × 9"),
]


@pytest.mark.parametrize(("make", "said"), DATASETS, ids=lambda v: str(v)[:30])
def test_a_dataset_that_does_not_fit_is_one_line(make: Any, said: str) -> None:
    trainer = TensorFlowDistributedTrainer(compiled(), batch_size=9, verbose=False)
    with pytest.raises(EngineError, match=said) as caught:
        trainer.fit(make())
    assert "\n" not in str(caught.value)


def test_a_frozen_or_an_unused_layer() -> None:
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(2, trainable=False)
    model = keras.Model(inputs, shared(inputs) + keras.layers.Dense(2)(inputs))
    model.compile(optimizer="sgd", loss="mse")
    before = [v.numpy() for v in shared.weights]
    TensorFlowDistributedTrainer(model, verbose=False).fit(pairs_of().batch(2))
    assert all(
        (v.numpy() == b).all() for v, b in zip(shared.weights, before, strict=True)
    )
    two = keras.Model(inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)])
    two.compile(optimizer="sgd", loss=["mse", None])
    data = pairs_of().map(lambda x, y: (x, (y, y))).batch(2)
    with pytest.raises(EngineError, match=r"\bdense.*trainable=False"):
        TensorFlowDistributedTrainer(two, verbose=False).fit(data)
