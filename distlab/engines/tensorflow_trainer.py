"""Train a compiled Keras model with TensorFlow on several processes.

    fit() ─▶ distlab.launch ─▶ rank.py in each process ─▶ train(job) ─▶ a file ─▶ fit()

The ranks meet through TF_CONFIG, and MultiWorkerMirroredStrategy averages their
gradients. Microbatches, clipping, warm-up, records and checkpoints work as on all
backends.

Limits: we read all samples into memory once, so if the dataset draws random numbers,
they are the same in every epoch. We don't compute metrics that you pass to compile():
History has the loss and, for targets that are class numbers, the accuracy. Keras's
callbacks and sample weights aren't supported. Keras's SGD multiplies the learning rate
into its momentum and torch's doesn't, so with a warm-up their steps differ. Only this
backend can continue its checkpoints, but on any number of ranks. All nodes must reach
each other on any port. With TensorFlow's GPU build, each rank would take the GPU of its
local number, but we haven't tried that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlab.engines.expect import EngineError
from distlab.engines.job import Outcome
from distlab.engines.keras_model import expect_model, pack
from distlab.engines.loaders import Loading
from distlab.engines.tensorflow_start import tensorflow
from distlab.engines.tensorflow_strategy import assign
from distlab.engines.trainer import Trainer


class TensorFlowDistributedTrainer(Trainer):
    """Trains a compiled Keras model, giving each rank its part of a batched tf.data.

    As with all trainers, the dataset's batches are those of one rank. With `shuffle`,
    `seed` gives each epoch a different order. `learning_rate` replaces the optimizer's.
    The module's docstring lists the limits.

    Example: `TensorFlowDistributedTrainer(model, num_gpus=2, epochs=3).fit(dataset)`

    Raises:
        EngineError: TensorFlow isn't installed, or the model doesn't fit the fields.
    """

    backends = ("tensorflow",)

    def __init__(
        self, model: Any, *, shuffle: bool = True, verbose: bool = True, **config: Any
    ) -> None:
        for name in ("loss", "optimizer"):
            if name in config:
                raise EngineError(f"{name} is given: model.compile() takes it")
        if config.get("scheduler") is not None:
            raise EngineError(
                "scheduler is given, and torch's can't drive a Keras optimizer: leave "
                "it out, there are warmup_epochs and lr_scaling"
            )
        super().__init__(model, verbose=verbose, **config)
        expect_model(model)
        self.shuffle = shuffle

    def _expect_trainable(self) -> None:
        """Do nothing, because `expect_model` has already checked this."""

    def _take(self, outcome: Outcome) -> None:
        own: Any = self.model
        assign("weights", own.variables, outcome.weights)

    def _loading(self, given: Any, batch_size: int | None, what: str) -> Loading:
        named = what.replace("loader", "dataset")
        return read_dataset(given, batch_size, named, shuffles=self.shuffle)

    def _sent(self, train: Loading) -> Any:
        return pack(self.model, train.dataset.batch([0])[0])


@dataclass(frozen=True)
class Samples:
    """Inputs and targets: arrays, or tuples and dictionaries of arrays."""

    arrays: tuple[Any, Any]
    num: int

    def __len__(self) -> int:
        return self.num

    def batch(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Return these samples."""
        chosen = list(indices)
        inputs, targets = (_each(part, lambda a: a[chosen]) for part in self.arrays)
        return inputs, targets

    def digest(self) -> int:
        """Hash the samples in their order."""
        digest = 0

        def add(array: Any) -> None:
            nonlocal digest
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)

        for part in self.arrays:
            _each(part, add)
        return digest


def read_dataset(
    dataset: Any, batch_size: int | None, what: str, *, shuffles: bool
) -> Loading:
    """Read all samples of a batched tf.data dataset; `batch_size` replaces its own.

    Raises:
        EngineError: the value isn't such a dataset, has no end, or doesn't yield inputs
            and targets.
    """
    tf = tensorflow()
    if not isinstance(dataset, tf.data.Dataset):
        raise EngineError(
            f"{what} is a {type(dataset).__name__}, must be a tf.data.Dataset"
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise EngineError(f"{what} has no end: use take(n) in place of repeat()")
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise EngineError(
            f"{what} must have batches of two parts, inputs and targets; it has {spec}"
        )
    parts = tf.nest.flatten(spec)
    if any(not isinstance(p, tf.TensorSpec) or p.shape.rank == 0 for p in parts):
        raise EngineError(f"{what} must have batches of dense tensors: call batch(n)")
    batches = list(dataset.as_numpy_iterator())
    if not batches:
        raise EngineError(f"{what} has no samples")
    sizes = [len(tf.nest.flatten(batch)[0]) for batch in batches]
    try:
        joined = tf.nest.map_structure(lambda *a: np.concatenate(a), *batches)
    except ValueError as error:
        raise EngineError(f"{what} has samples of several shapes: {error}") from error
    return Loading(
        dataset=Samples(joined, sum(sizes)),
        batch_size=batch_size or sizes[0],
        shuffles=shuffles,
        drop_last=parts[0].shape[0] is not None,
    )


def _each(value: Any, change: Any) -> Any:
    """Apply `change` to each array of a structure, without TensorFlow."""
    if isinstance(value, dict):
        return {key: _each(one, change) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_each(one, change) for one in value)
    return change(value)
