"""Run one rank of TensorFlow: a Keras model's forward, backward and step.

In Keras 3, fit() doesn't run under MultiWorkerMirroredStrategy, so we take the steps
here. We add up the gradients of microbatches on the rank, let the strategy average them
over the ranks, clip them, and pass them to the model's own optimizer.

Source: TensorFlow's documentation, "Custom training with tf.distribute.Strategy".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.keras_model import KerasModel
from distlab.engines.loaders import Loading
from distlab.engines.losses import Loss
from distlab.engines.samples import Microbatch
from distlab.engines.strategies import register_strategy
from distlab.engines.strategy import Judged, Strategy
from distlab.engines.tensorflow_start import open_strategy, tensorflow


class TensorFlow(Strategy):
    """A rank of TensorFlow's cluster, with a copy of the model, which has an optimizer.

    Raises:
        EngineError: TensorFlow isn't installed, or the ranks can't meet.
    """

    def __init__(
        self, config: DistributedConfig, sent: KerasModel, optimizer: None = None
    ) -> None:
        super().__init__(config)
        self.tf = tf = tensorflow()
        self.strategy = open_strategy(config.communication_backend)
        self.world_size = self.strategy.num_replicas_in_sync
        cluster = self.strategy.cluster_resolver  # none with one rank
        self.rank = cluster.task_id if cluster else 0
        self.device = torch.device("cpu")  # of the figures, which torch adds up
        self.mean = tf.distribute.ReduceOp.MEAN
        self.total = tf.distribute.ReduceOp.SUM
        # Each rank has variables of its own: those of the strategy's scope are summed
        # over the ranks by Keras's optimizer, after it has clipped.
        self.model = sent.load()
        self.knows_training = "training" in signature(self.model.call).parameters
        self.keras_optimizer = self.model.optimizer
        self.variables = self.model.trainable_variables
        self.sums = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in self.variables
        ]
        kept = {id(v) for v in self.model.weights}
        self.seeds = [v for v in self.model.variables if id(v) not in kept]
        self.seen: set[int] = set()
        # As in Keras. AutoGraph would also wrap an error's line in others.
        options = {"autograph": False, "reduce_retracing": True}
        self._learn = tf.function(self._learn_here, **options)
        self._judge = tf.function(self._judge_here, **options)
        self._step = tf.function(self._step_here, **options)
        self._sum = tf.function(self._sum_replicated, **options)
        self._take_from_rank_0()
        self._spread_seeds()

    # ── a step ──────────────────────────────────────────────────────────────────────

    def batches(self, loading: Loading, plan: Sequence[Microbatch]) -> Iterator[Any]:
        """Implement `Strategy.batches`; collective when it first sees a dataset."""
        self._expect_same_samples(loading.dataset)
        return (loading.dataset.batch(one.indices) for one in plan)

    def learn(self, loss: Loss, batch: Any, micro: Microbatch) -> Tensor:
        """Implement `Strategy.learn` with the loss that the model was compiled with."""
        weight = self.tf.constant(micro.weight, self.tf.float64)
        value = self._learn(*self._tensors(batch), weight)
        return torch.tensor(value.numpy().item(), dtype=torch.double)

    def _learn_here(self, inputs: Any, targets: Any, weight: Any) -> Any:
        tf = self.tf
        with tf.GradientTape() as tape:
            weighted = self._loss(inputs, targets, True)[0]
            weighted *= tf.cast(weight, weighted.dtype)
        gradients = tape.gradient(weighted, [v.value for v in self.variables])
        for own, gradient, sum_ in zip(
            self.variables, gradients, self.sums, strict=True
        ):
            if gradient is None:
                raise EngineError(
                    f"the loss does not depend on {own.path}: set trainable=False"
                )
            sum_.assign_add(tf.convert_to_tensor(gradient))
        return tf.cast(weighted, tf.float64)

    def _loss(self, inputs: Any, targets: Any, training: bool) -> tuple[Any, Any]:
        """Return the mean loss of a batch, and the outputs."""
        mode = {"training": training} if self.knows_training else {}
        outputs = self.model(inputs, **mode)
        loss = self.model.compute_loss(
            x=inputs, y=targets, y_pred=outputs, training=training
        )
        return loss, outputs

    def step(self) -> float:
        """Implement `Strategy.step`."""
        with self._naming_a_lost_rank():
            return float(self._step())

    def _step_here(self) -> Any:
        tf = self.tf
        sums = [tf.identity(sum_) for sum_ in self.sums]
        gradients = self.strategy.run(self._mean_here, (sums,))
        norm = tf.linalg.global_norm(gradients)
        largest = self.config.gradient_clipping
        if largest is not None:
            # As torch clips: by a norm that is a little larger.
            factor = tf.minimum(tf.cast(1, norm.dtype), largest / (norm + 1e-6))
            gradients = [g * tf.cast(factor, g.dtype) for g in gradients]
        self.keras_optimizer.apply(gradients, self.variables)
        for sum_ in self.sums:
            sum_.assign(tf.zeros_like(sum_))
        return tf.cast(norm, tf.float64)

    def _mean_here(self, sums: list[Any]) -> Any:
        context = self.tf.distribute.get_replica_context()
        return context.all_reduce(self.mean, [self.tf.identity(one) for one in sums])

    def judge(self, loss: Loss, batch: Any) -> Judged:
        """Implement `Strategy.judge`; accuracy needs targets that are class numbers."""
        value, right, num = self._judge(*self._tensors(batch))
        return Judged(value.numpy().item(), num_right=int(right), num_judged=int(num))

    def _judge_here(self, inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
        tf = self.tf
        value, outputs = self._loss(inputs, targets, False)
        value = tf.cast(value, tf.float64)
        if not _are_scores(tf, outputs, targets):
            return value, tf.constant(0), tf.constant(0)
        if targets.shape.rank == outputs.shape.rank:
            targets = tf.squeeze(targets, -1)
        found = tf.argmax(outputs, -1, output_type=tf.int64)
        is_right = tf.equal(found, tf.cast(targets, tf.int64))
        return value, tf.reduce_sum(tf.cast(is_right, tf.int32)), tf.size(targets)

    def _tensors(self, batch: Any) -> tuple[Any, Any]:
        inputs, targets = self.tf.nest.map_structure(self.tf.constant, batch)
        return inputs, targets

    def set_training(self, is_on: bool) -> None:
        """Implement `Strategy.set_training`; collective, to combine moving averages."""
        if not is_on:
            self._average_moving()

    @property
    def model_and_optimizer(self) -> tuple[Any, Any]:
        """Implement `Strategy.model_and_optimizer`: Keras's model and optimizer."""
        return self.model, self.keras_optimizer

    def rates(self) -> list[float]:
        """Implement `Strategy.rates`."""
        return [float(self.keras_optimizer.learning_rate.numpy())]

    def set_rate(self, rates: list[float]) -> None:
        """Implement `Strategy.set_rate`."""
        self.keras_optimizer.learning_rate = rates[0]

    # ── all ranks together ──────────────────────────────────────────────────────────

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum`."""
        with self._naming_a_lost_rank():
            value = self._sum(self.tf.constant(tensor.numpy()))
        tensor.copy_(torch.from_numpy(np.array(value.numpy())).reshape(tensor.shape))
        return tensor

    @contextlib.contextmanager
    def _naming_a_lost_rank(self) -> Iterator[None]:
        """Replace TensorFlow's many lines about a lost rank by a clear message."""
        errors = self.tf.errors
        lost = errors.UnavailableError, errors.AbortedError, errors.CancelledError
        try:
            yield
        except lost as error:
            kind = type(error).__name__
            raise EngineError(
                f"another rank has ended, or cannot be reached ({kind})"
            ) from error

    def _sum_replicated(self, value: Any) -> Any:
        return self.strategy.run(self._sum_here, (value,))

    def _sum_here(self, value: Any) -> Any:
        context = self.tf.distribute.get_replica_context()
        return context.all_reduce(self.total, self.tf.identity(value))

    def _expect_same_samples(self, samples: Any) -> None:
        """Require the same samples on all ranks, as scripts may read their own.

        Raises:
            EngineError: a rank has other samples, or has them in another order.
        """
        if self.world_size == 1 or id(samples) in self.seen:
            return
        self.seen.add(id(samples))
        digests = torch.zeros(self.world_size, dtype=torch.double)
        digests[self.rank] = samples.digest()
        others = (self.sum(digests) != digests[0]).nonzero().flatten().tolist()
        if others:
            raise EngineError(
                f"rank {others[0]} has other samples than rank 0, or in another order: "
                "shuffle() in the dataset needs a seed, or leave it to shuffle=True"
            )

    def _take_from_rank_0(self) -> None:
        """Take rank 0's weights, because a script may have drawn its own."""
        if self.world_size == 1:
            return
        variables = [*self.model.variables, *self.keras_optimizer.variables]
        values = _flat(variables)
        first = self.sum(values if self.rank == 0 else torch.zeros_like(values))
        _assign_parts(variables, first)

    def _average_moving(self) -> None:
        """Average batch norm's statistics, which each rank has of its own batches."""
        moving = [
            v for v in self.model.non_trainable_weights if "float" in str(v.dtype)
        ]
        if self.world_size == 1 or not moving:
            return
        _assign_parts(moving, self.sum(_flat(moving)) / self.world_size)

    def _spread_seeds(self) -> None:
        """Give each rank a different dropout; rank 0 keeps the one that was sent."""
        for seed in self.seeds:
            first, counter = seed.numpy().tolist()
            seed.assign([(first + self.rank) % 2**32, counter])

    def weights(self) -> dict[str, Tensor]:
        """Implement `Strategy.weights`, with dropout's state, in the model's order."""
        self._average_moving()
        return _numbered(self.model.variables)

    def optimizer_state(self) -> dict[str, Any]:
        """Implement `Strategy.optimizer_state`; in the order of the optimizer."""
        return dict(_numbered(self.keras_optimizer.variables))

    def expect_fits(self, state: dict[str, Any]) -> None:
        """Implement `Strategy.expect_fits`; `load` checks this, by numbers."""

    def settings(self) -> Any:
        """Implement `Strategy.settings`; there are none."""
        return None

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Implement `Strategy.load`.

        Raises:
            ValueError: the state is from another model or another optimizer.
        """
        assign("weights", self.model.variables, weights)
        assign("variables of the optimizer", self.keras_optimizer.variables, state)
        self._spread_seeds()

    def close(self) -> None:
        """Implement `Strategy.close`; TensorFlow's cluster ends with the process."""


def assign(what: str, variables: Sequence[Any], values: dict[str, Any]) -> None:
    """Set variables of Keras to the values that `_numbered` returned.

    Raises:
        ValueError: the variables or their shapes differ.
    """
    if len(variables) != len(values):
        raise ValueError(f"it has {len(values)} {what}, not {len(variables)}")
    for (name, value), variable in zip(values.items(), variables, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(variable.shape):
            raise ValueError(f"{name} of its {what} is not of {tuple(variable.shape)}")
    for value, variable in zip(values.values(), variables, strict=True):
        variable.assign(value.numpy())


def _tensor(variable: Any) -> Tensor:
    return torch.from_numpy(np.array(variable.numpy()))


def _flat(variables: Sequence[Any]) -> Tensor:
    """Return the values of all variables in one vector."""
    return torch.cat([_tensor(v).double().flatten() for v in variables])


def _assign_parts(variables: Sequence[Any], values: Tensor) -> None:
    """Undo `_flat`."""
    shapes = [tuple(v.shape) for v in variables]
    parts = values.split([math.prod(shape) for shape in shapes])
    for variable, shape, part in zip(variables, shapes, parts, strict=True):
        variable.assign(part.reshape(shape).numpy().astype(variable.dtype))


def _numbered(variables: Sequence[Any]) -> dict[str, Tensor]:
    """Return the values by number, because names change when a model is rebuilt."""
    return {
        f"{index:04d}": _tensor(variable) for index, variable in enumerate(variables)
    }


def _are_scores(tf: Any, outputs: Any, targets: Any) -> bool:
    if not (tf.is_tensor(outputs) and tf.is_tensor(targets)):
        return False
    is_column = targets.shape.rank == outputs.shape.rank and targets.shape[-1] == 1
    is_flat = outputs.shape.rank == targets.shape.rank + 1
    return bool(
        targets.dtype.is_integer
        and (is_flat or is_column)
        and (outputs.shape[-1] or 0) > 1
    )


register_strategy(
    "tensorflow",
    TensorFlow,
    needs="tensorflow",
    trains="keras",
    script_runner="distlab.engines.tensorflow_rank",
    precisions=(),
    communication_backends=("nccl",),
    refusals={
        "mixed_precision": (
            "backend tensorflow takes the precision from the model: leave "
            "mixed_precision out, give its layers the policy mixed_bfloat16"
        ),
        "communication_backend": (
            "backend tensorflow has no gloo: leave communication_backend out"
        ),
        "checkpoint_format": (
            "backend tensorflow has no checkpoint_format dcp, which is torch's"
        ),
        "profile_dir": (
            "profile_dir is for torch's profiler, which sees nothing of TensorFlow's "
            "work: leave it out"
        ),
    },
)
