"""The settings of a training on an engine, checked before anything starts.

    values from a caller ─▶ config_from ─▶ DistributedConfig ─▶ the worker of each rank

We refuse a field that the chosen backend can't honour, so nothing is ignored.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from distlab.engines import deepspeed_config
from distlab.engines.expect import (
    EngineError,
    expect_among,
    expect_int,
    expect_number,
    expect_path,
)
from distlab.engines.strategies import (
    find_strategy,
    implied_strategy,
    ranks_of_job,
)
from distlab.monitor.sinks import expect_known

BACKEND_VARIABLE = "DISTLAB_ENGINE"  # `distlab train --backend` sets it for a script
ABSENT = {
    "mpi": "there is no MPI backend: choose gloo or nccl",
    "mxnet": "there is no MXNet engine: that project has ended",
    "ray-serve": "there is no Ray Serve engine: distlab trains and does not serve",
}
MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Settings of a training on `num_gpus` ranks, which are CPU processes without GPUs.

    Raises:
        EngineError: fields contradict each other, or a value is invalid.
    """

    num_gpus: int | None = None
    """Ranks in total; None means num_nodes × gpus_per_node."""
    num_nodes: int = 1
    gpus_per_node: int | None = None
    backend: str = ""
    """The strategy, as strategies.py lists them. "" means the one that other fields
    imply (deepspeed_config: deepspeed, zero_stage 2 or 3: fsdp2), else pytorch-ddp."""
    batch_size: int | None = None
    """Samples per microbatch on each rank; None means the loader's batch size."""
    epochs: int = 1
    learning_rate: float | None = None
    """Learning rate before scaling; None means the optimizer's, 1e-3 by default."""
    mixed_precision: bool | str = False
    """False, "bf16" or "fp16"; True means "fp16"."""
    scaler_init_scale: float = 65536.0
    """Loss scale for fp16. A resumed training continues with the scale it had."""
    scaler_growth_interval: int = 2000
    gradient_accumulation_steps: int = 1
    gradient_clipping: float | None = None
    """Clip all gradients together to this norm."""
    communication_backend: str | None = None
    """nccl or gloo; None means nccl if the ranks have GPUs, otherwise gloo."""
    find_unused_parameters: bool = False
    zero_stage: int | None = None
    """How much to shard: 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    offload_params: bool = False
    deepspeed_config: dict[str, Any] | str | Path | None = None
    """DeepSpeed's configuration, or a JSON file of it: see deepspeed_config.py."""
    compression: str = "none"
    """How to compress the gradients we send: none, fp16, bf16 or powersgd."""
    lr_scaling: str = "none"
    """How the learning rate grows with the ranks: none, linear or sqrt."""
    warmup_epochs: float = 0.0
    checkpoint_frequency: int = 1
    """Epochs from one checkpoint to the next."""
    checkpoint_dir: str | Path | None = None
    checkpoint_format: str = "pt"
    """pt for a file of distlab's, or dcp for a folder that FSDP2 scripts can load."""
    resume_from_checkpoint: bool | str | Path = False
    """True for the newest in checkpoint_dir, or the path of a file or DCP folder."""
    mlflow_tracking: bool | None = None
    """None turns it on if you pass mlflow_experiment."""
    mlflow_experiment: str | None = None
    tensorboard: bool | None = None
    """None turns it on if you pass tensorboard_dir."""
    tensorboard_dir: str | Path | None = None
    profile_dir: str | Path | None = None
    """Each rank writes a torch.profiler trace of a few steps into this folder."""
    monitor_dir: str | Path | None = None
    """A new folder for the records of all ranks, which `distlab top` shows."""
    monitor_also: str | Sequence[str] = ()
    """Also send them to tensorboard, prometheus[:PORT] or otlp[:[ADDRESS:]PORT]."""
    log_every_n_steps: int = 10
    early_stopping: int | None = None
    """Stop after this many epochs without a better validation loss."""
    seed: int = 0
    """Determines the order of the samples and each rank's random numbers."""
    cost_per_gpu_hour: float = 0.0
    max_cost: float | None = None
    """Stop at the next record of steps once the training has cost this much."""

    def __post_init__(self) -> None:
        self._settle()
        self._expect_resources()
        self._expect_switches()
        self._expect_whole_numbers()
        self._expect_choices()
        self._expect_numbers()
        self._expect_backend_fits()
        self._expect_places()

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        if self.num_gpus is not None:
            return self.num_gpus
        return self.num_nodes * (self.gpus_per_node or 1)

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node."""
        return self.world_size // self.num_nodes

    @property
    def precision(self) -> str | None:
        """Return `bf16`, `fp16` or None."""
        given = self.mixed_precision
        return given if isinstance(given, str) else "fp16" if given else None

    @property
    def stage(self) -> int:
        """Return `zero_stage`, or the backend's own default."""
        if self.zero_stage is not None:
            return self.zero_stage
        return find_strategy(self.backend).default_stage

    @property
    def scale_of_rate(self) -> float:
        """Return the factor by which lr_scaling multiplies the learning rate."""
        world = self.world_size
        return {"none": 1.0, "linear": float(world), "sqrt": math.sqrt(world)}[
            self.lr_scaling
        ]

    @property
    def also(self) -> tuple[str, ...]:
        """Return `monitor_also` as a tuple."""
        given = self.monitor_also
        return (given,) if isinstance(given, str) else tuple(given)

    def _settle(self) -> None:
        """Convert NumPy numbers to Python's, and fill in fields that others imply."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
        self._settle_deepspeed()
        implied = {
            "backend": self.backend or implied_strategy(self),
            "tensorboard": _or(self.tensorboard, self.tensorboard_dir is not None),
            "mlflow_tracking": _or(
                self.mlflow_tracking, self.mlflow_experiment is not None
            ),
        }
        for name, value in implied.items():
            object.__setattr__(self, name, value)

    def _settle_deepspeed(self) -> None:
        """Read our fields from `deepspeed_config`, which is a dictionary after that."""
        if self.deepspeed_config is None:
            return
        more = deepspeed_config.read(self.deepspeed_config)
        object.__setattr__(self, "deepspeed_config", more)
        is_named = self.num_gpus is not None or self.gpus_per_node is not None
        world = self.world_size if is_named else ranks_of_job(self.world_size)
        usual = {field.name: field.default for field in fields(self)}
        for name, value in deepspeed_config.fields_in(more, world).items():
            own = getattr(self, name)
            if own not in (usual[name], value):
                raise EngineError(
                    f"{name} is {own}, but deepspeed_config says {value}: leave one "
                    "of them out"
                )
            object.__setattr__(self, name, value)

    def _expect_switches(self) -> None:
        """Require real booleans, because the text "false" would count as true."""
        for name in SWITCHES:
            expect_among(name, getattr(self, name), (False, True))

    def _expect_resources(self) -> None:
        for name in ("num_gpus", "num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if value is not None:
                expect_int(name, value, 1, MAX_RANKS)
        nodes, each = self.num_nodes, self.gpus_per_node
        if self.num_gpus is None:
            return
        if each is not None and self.num_gpus != nodes * each:
            raise EngineError(
                f"num_gpus is {self.num_gpus}, but num_nodes × gpus_per_node is "
                f"{nodes} × {each} = {nodes * each}: leave one of them out"
            )
        if self.num_gpus % nodes:
            raise EngineError(
                f"num_gpus is {self.num_gpus}, which {nodes} nodes cannot divide evenly"
            )

    def _expect_whole_numbers(self) -> None:
        least = {
            "epochs": 1,
            "scaler_growth_interval": 1,
            "gradient_accumulation_steps": 1,
            "checkpoint_frequency": 1,
            "log_every_n_steps": 1,
            "batch_size": 1,
            "early_stopping": 1,
            "seed": 0,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None:
                expect_int(name, value, smallest)

    def _expect_numbers(self) -> None:
        for name in ("scaler_init_scale", "learning_rate", "gradient_clipping"):
            expect_number(name, getattr(self, name), is_zero_fine=False)
        for name in ("warmup_epochs", "cost_per_gpu_hour", "max_cost"):
            expect_number(name, getattr(self, name), is_zero_fine=True)
        if self.max_cost is not None and not self.cost_per_gpu_hour:
            raise EngineError("max_cost needs cost_per_gpu_hour, which is 0")
        if self.precision != "fp16":
            for field in fields(self):
                is_given = getattr(self, field.name) != field.default
                if field.name.startswith("scaler_") and is_given:
                    raise EngineError(
                        f"{field.name} is given, but mixed_precision is "
                        f"{self.precision}, and it only applies to fp16"
                    )

    def _expect_choices(self) -> None:
        if self.backend in ABSENT:
            raise EngineError(ABSENT[self.backend])
        find_strategy(self.backend)
        wire = self.communication_backend
        if wire in ABSENT:
            raise EngineError(ABSENT[wire])
        expect_among("communication_backend", wire, (None, *WIRES))
        expect_among(
            "mixed_precision", self.mixed_precision, (False, True, "bf16", "fp16")
        )
        expect_among(
            "compression", self.compression, ("none", "fp16", "bf16", "powersgd")
        )
        expect_among("lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        expect_among("zero_stage", self.zero_stage, (None, 0, 1, 2, 3))
        expect_among("checkpoint_format", self.checkpoint_format, ("pt", "dcp"))

    def _expect_backend_fits(self) -> None:
        find_strategy(self.backend).expect_fits(self)
        if self.compression == "powersgd" and self.precision == "fp16":
            raise EngineError(
                "compression powersgd doesn't work with mixed_precision fp16, because "
                "torch's residual keeps the inf of a skipped step forever: choose bf16"
            )
        if self.compression == "bf16" and self.communication_backend == "gloo":
            raise EngineError("compression bf16 needs nccl: gloo cannot sum bfloat16")

    def _expect_places(self) -> None:
        for name in FOLDERS:
            expect_path(name, getattr(self, name))
        if not isinstance(self.resume_from_checkpoint, bool):
            expect_path("resume_from_checkpoint", self.resume_from_checkpoint)
        if self.resume_from_checkpoint is True and self.checkpoint_dir is None:
            raise EngineError("resume_from_checkpoint is True, but no checkpoint_dir")
        if self.mlflow_experiment is not None and not self.mlflow_tracking:
            raise EngineError("mlflow_experiment is given, but mlflow_tracking is off")
        if self.tensorboard_dir is not None and not self.tensorboard:
            raise EngineError("tensorboard_dir is given, but tensorboard is off")
        if self.also and self.monitor_dir is None:
            raise EngineError("monitor_also is given, but no monitor_dir")
        try:
            expect_known(self.also)
        except ValueError as error:
            said = str(error).replace("--also", "monitor_also", 1)
            raise EngineError(said) from error


FOLDERS = ("checkpoint_dir", "tensorboard_dir", "profile_dir", "monitor_dir")
WIRES = ("gloo", "nccl")
SWITCHES = (
    "find_unused_parameters",
    "offload_optimizer",
    "offload_params",
    "mlflow_tracking",
    "tensorboard",
)
ELSEWHERE = {
    "lr": "learning_rate",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "world_size": "num_gpus",
    "nproc_per_node": "gpus_per_node",
    "devices": "num_gpus",
    "gpus": "num_gpus",
    "num_workers": "num_gpus",
    "nodes": "num_nodes",
    "nnodes": "num_nodes",
    "strategy": "backend",
    "precision": "mixed_precision",
    "amp": "mixed_precision",
    "fp16": "mixed_precision",
    "bf16": "mixed_precision",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "gradient_clip_val": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "micro_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "patience": "early_stopping",
    "early_stopping_patience": "early_stopping",
    "warmup_steps": "warmup_epochs",
    "save_every": "checkpoint_frequency",
    "output_dir": "checkpoint_dir",
    "save_format": "checkpoint_format",
    "ckpt_path": "resume_from_checkpoint",
    "resume": "resume_from_checkpoint",
    "logging_steps": "log_every_n_steps",
    "log_dir": "tensorboard_dir",
    "profiler": "profile_dir",
    "profile": "profile_dir",
    "deepspeed": "deepspeed_config",
    "ds_config": "deepspeed_config",
    "random_seed": "seed",
    "criterion": "loss",
    "loss_fn": "loss",
    "loss_function": "loss",
    "optim": "optimizer",
    "lr_scheduler": "scheduler",
    "scheduler_fn": "scheduler",
    "lr_scheduler_interval": "scheduler_interval",
    "max_steps": "fit(max_steps=…)",
}
"""Maps other libraries' names to our fields and the trainers' arguments."""


def config_from(values: Mapping[str, Any]) -> DistributedConfig:
    """Create a configuration from names and values; DISTLAB_ENGINE may set `backend`.

    Raises:
        EngineError: there is no such field, or a value is invalid.
    """
    known = [field.name for field in fields(DistributedConfig)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *ELSEWHERE], n=1)
            meant = ELSEWHERE.get(near[0], near[0]) if near else None
            hint = (
                f"did you mean {meant!r}?" if meant else f"there are {', '.join(known)}"
            )
            raise EngineError(f"DistributedConfig has no field {name!r}; {hint}")
    given = dict(values)
    if "backend" not in given and (named := os.environ.get(BACKEND_VARIABLE)):
        given["backend"] = named
    return DistributedConfig(**given)


def with_world_size(config: DistributedConfig, world_size: int) -> DistributedConfig:
    """Adapt the configuration to a running job, which has its own number of ranks.

    Raises:
        EngineError: the configuration names another number.
    """
    named = config.num_gpus is not None or config.gpus_per_node is not None
    if named and config.world_size != world_size:
        raise EngineError(
            f"the job has {world_size} ranks, but the configuration says "
            f"{config.world_size}: leave num_gpus out under a launcher"
        )
    return replace(config, num_gpus=world_size, num_nodes=1, gpus_per_node=None)


def _or(given: bool | None, otherwise: bool) -> bool:
    return otherwise if given is None else given
