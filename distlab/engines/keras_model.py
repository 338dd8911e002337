"""Turn a compiled Keras model into a value that we can send to other processes.

This includes the optimizer, the loss and its weights, and everything registered with
keras.saving.register_keras_serializable, but not metrics.

Keras's own description of a model leaves three things out, and each would round a
float64 training to float32 in the other process. The default dtype of new layers isn't
`floatx` but a policy, which Keras sets from `floatx` once, when the first layer of a
process is made. A loss doesn't describe its dtype. And an optimizer's settings, such as
the momentum, are Python numbers, which TensorFlow reads as float32.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from distlab.engines.expect import EngineError
from distlab.engines.tensorflow_start import keras

SUMS = ("sum", None, "none")
"""Reductions that aren't a mean over the samples."""


@dataclass(frozen=True, kw_only=True)
class KerasModel:
    """A model with its weights, and with the arguments of its compile()."""

    archive: bytes = field(repr=False)
    compiled: dict[str, Any] = field(repr=False)
    objects: bytes = field(repr=False)
    """Registered classes and functions, pickled by cloudpickle."""
    floatx: str
    policy: str
    """The name of the dtype policy of new layers."""
    optimizer_values: tuple[Any, ...] = field(repr=False)
    """Values of the optimizer's variables, if it has created them."""

    def load(self) -> Any:
        """Rebuild the model in this process, where a strategy may be open.

        Raises:
            EngineError: this process doesn't know a part of the model.
        """
        k = keras()
        k.config.set_floatx(self.floatx)
        k.config.set_dtype_policy(self.policy)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            path.write_bytes(self.archive)
            try:
                # First: a class may register itself when it is read.
                objects = cloudpickle.loads(self.objects)
                with k.saving.custom_object_scope(objects):
                    model = k.saving.load_model(path, compile=False, safe_mode=False)
                    with _rates_for(model):
                        model.compile_from_config(self.compiled)
            except (TypeError, ValueError, ImportError, AttributeError) as error:
                raise EngineError(
                    f"the model cannot be read in another process: {_first(error)}; "
                    "register its classes with keras.saving"
                    ".register_keras_serializable"
                ) from error
        optimizer = model.optimizer
        if _is_double(model):
            settings = {n: v for n, v in vars(optimizer).items() if type(v) is float}
            for name, value in settings.items():
                setattr(optimizer, name, np.float64(value))
        optimizer.build(model.trainable_variables)
        if self.optimizer_values:
            pairs = zip(optimizer.variables, self.optimizer_values, strict=True)
            for variable, value in pairs:
                variable.assign(value)
        return model


def pack(model: Any, first_inputs: Any) -> KerasModel:
    """Pack `model` in its current state; build it on `first_inputs` if necessary.

    Raises:
        EngineError: `model` isn't a compiled Keras model, or we can't train it here.
    """
    k = keras()
    expect_model(model)
    if not model.built:
        model(first_inputs)
    objects = dict(k.saving.get_custom_objects())
    objects |= {one.__name__: one for one in _losses(model) if inspect.isfunction(one)}
    compiled = dict(model.get_compile_config() or {})
    compiled |= {"metrics": None, "weighted_metrics": None}
    compiled["loss"] = _with_dtypes(compiled.get("loss"), model.loss)
    optimizer = model.optimizer
    values = [v.numpy() for v in optimizer.variables] if optimizer.built else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            model.save(path)
            sent = cloudpickle.dumps(objects)
        except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
            raise EngineError(
                f"the model cannot go to other processes: {_first(error)}"
            ) from error
        return KerasModel(
            archive=path.read_bytes(),
            compiled=compiled,
            objects=sent,
            floatx=k.config.floatx(),
            policy=k.config.dtype_policy().name,
            optimizer_values=tuple(values),
        )


def expect_model(model: Any) -> None:
    """Refuse a model that lacks what a step needs, or that defines its own step.

    Raises:
        EngineError: the message names the first thing that doesn't fit.
    """
    k = keras()
    if not isinstance(model, k.Model):
        raise EngineError(f"model is a {type(model).__name__}, must be a keras.Model")
    if not model.compiled or model.optimizer is None or not _losses(model):
        raise EngineError(
            "the model is not compiled with an optimizer and a loss: call "
            "model.compile(optimizer=…, loss=…)"
        )
    if type(model).train_step is not k.Model.train_step:
        raise EngineError(
            f"{type(model).__name__} has a train_step of its own, which is not called "
            "here: override compute_loss"
        )
    for loss in _losses(model):
        if isinstance(loss, k.losses.Loss) and loss.reduction in SUMS:
            raise EngineError(
                f"the loss has reduction={loss.reduction!r}: it must be a mean over "
                "the samples"
            )
    optimizer = model.optimizer
    if isinstance(optimizer, k.optimizers.LossScaleOptimizer):
        raise EngineError("the model is of mixed_float16: choose mixed_bfloat16")
    if optimizer.gradient_accumulation_steps:
        raise EngineError(
            "the optimizer has gradient_accumulation_steps of its own: give it to the "
            "trainer"
        )
    schedule = k.optimizers.schedules.LearningRateSchedule
    if isinstance(optimizer._learning_rate, schedule):
        raise EngineError(
            "the optimizer has a schedule: give it a number, and warmup_epochs or "
            "lr_scaling to the trainer"
        )


def _losses(model: Any) -> list[Any]:
    """Return the losses passed to compile(), output by output."""
    given = getattr(model, "loss", None)
    if isinstance(given, dict):
        given = list(given.values())
    each = given if isinstance(given, list | tuple) else [given]
    return [one for one in each if one is not None]


def _with_dtypes(described: Any, given: Any) -> Any:
    """Return Keras's description of the losses, with the dtypes that it leaves out."""
    k = keras()
    if isinstance(given, dict):
        return {key: _with_dtypes(described[key], one) for key, one in given.items()}
    if isinstance(given, list):
        return [_with_dtypes(*pair) for pair in zip(described, given, strict=True)]
    is_loss = isinstance(given, k.losses.Loss) and given.dtype != k.config.floatx()
    if not is_loss or "dtype" not in inspect.signature(type(given)).parameters:
        return described
    return {**described, "config": {**described["config"], "dtype": given.dtype}}


def _is_double(model: Any) -> bool:
    """Return True if all trained weights are float64."""
    return {v.dtype for v in model.trainable_variables} == {"float64"}


@contextlib.contextmanager
def _rates_for(model: Any) -> Iterator[None]:
    """Give learning rates that are created in this block the model's precision."""
    config = keras().config
    before = config.floatx()
    if _is_double(model):
        config.set_floatx("float64")
    try:
        yield
    finally:
        config.set_floatx(before)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
