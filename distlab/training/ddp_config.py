"""The settings of a training of `distlab ddp`, checked and completed with defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

MAX_RANKS = 64
IDX = "idx"  # four files of one's own

Optimizer = Literal["sgd", "adam", "adamw"]
Scaling = Literal["none", "linear", "sqrt"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The default settings for a data set."""

    epochs: int
    global_batch_size: int
    learning_rate: float
    momentum: float


_IMAGES = Preset(epochs=1, global_batch_size=64, learning_rate=0.03, momentum=0.9)
PRESETS = {
    "digits": Preset(epochs=10, global_batch_size=64, learning_rate=0.2, momentum=0.0),
    "mnist": _IMAGES,
    # A larger batch, and so quieter steps: what rounding starts stays small longer.
    "fashion-mnist": Preset(
        epochs=3, global_batch_size=256, learning_rate=0.05, momentum=0.9
    ),
    IDX: _IMAGES,
}
_ADAPTIVE_RATE = 1e-3  # of Adam and AdamW, whatever the data


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    """The settings of one training on `world_size` ranks.

    From each global batch, we use the largest multiple of `multiple_of` samples, so
    that all ranks have equally many. `learning_rate` is the optimizer's, after scaling.
    `code` says whose units the ranks run: "reference", "mine", or files. If it is
    empty, `distlab use` decides.
    """

    dataset: str
    world_size: int
    epochs: int
    global_batch_size: int
    multiple_of: int
    learning_rate: float
    lr_scaling: Scaling
    optimizer: Optimizer
    momentum: float
    weight_decay: float
    seed: int
    device: Device
    code: tuple[str, ...]

    @property
    def backend(self) -> str:
        """The transport for the ranks' messages."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def samples_per_rank(self) -> int:
        """The number of samples of a global batch that each rank has."""
        return self.equal_size(self.global_batch_size)

    @property
    def step_size(self) -> int:
        """The number of samples of a global batch that all ranks have together."""
        return self.samples_per_rank * self.world_size

    def equal_size(self, size: int) -> int:
        """Return how many samples of a batch of `size` each rank has."""
        return size // self.multiple_of * self.multiple_of // self.world_size


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The settings that the user asked for; None for those left open."""

    world_size: int = 2
    epochs: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    lr_scaling: str = "none"
    optimizer: str = "sgd"
    momentum: float | None = None
    weight_decay: float = 0.0
    dataset: str = "digits"
    device: str = "auto"
    seed: int = 0
    code: tuple[str, ...] = ()


def make_config(wishes: Wishes, *, num_gpus: int) -> DdpConfig:
    """Return the training that the user asked for, on a machine with `num_gpus` GPUs.

    Raises:
        ValueError: the settings contradict each other, or don't work on this machine.
    """
    w = wishes
    _one_of(w.dataset, tuple(PRESETS), "--dataset")
    _one_of(w.optimizer, get_args(Optimizer), "--optimizer")
    _one_of(w.lr_scaling, get_args(Scaling), "--lr-scaling")
    _one_of(w.device, ("auto", *get_args(Device)), "--device")
    if not 1 <= w.world_size <= MAX_RANKS:
        raise ValueError(f"{w.world_size} ranks: choose between 1 and {MAX_RANKS}")
    preset = PRESETS[w.dataset]
    epochs = preset.epochs if w.epochs is None else w.epochs
    if epochs < 1:
        raise ValueError(f"{epochs} epochs: choose at least 1")
    if not 0 <= w.seed < 1 << 40:
        raise ValueError(f"--seed {w.seed}: choose between 0 and {(1 << 40) - 1}")
    values: dict[str, Any] = {
        "dataset": w.dataset,
        "world_size": w.world_size,
        "epochs": epochs,
        "global_batch_size": _global_batch_size(w, preset),
        "multiple_of": w.world_size,
        "learning_rate": _learning_rate(w, preset),
        "lr_scaling": w.lr_scaling,
        "optimizer": w.optimizer,
        "momentum": _momentum(w, preset),
        "weight_decay": _in_range(w.weight_decay, "--weight-decay", 0.0),
        "seed": w.seed,
        "device": _device(w, num_gpus),
        "code": w.code,
    }
    return DdpConfig(**values)


def _one_of(value: str, choices: tuple[str, ...], flag: str) -> None:
    if value not in choices:
        *most, last = choices
        raise ValueError(f"{flag} {value}: choose {', '.join(most)} or {last}")


def _in_range(
    value: float, flag: str, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    fits = low < value < high if above else low <= value < high
    if not fits:  # nor does what is not a number
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and below {high:g}"
        raise ValueError(f"{flag} {value:g}: choose a number {least}{most}")
    return value


def _global_batch_size(w: Wishes, preset: Preset) -> int:
    if w.batch_size is not None and w.global_batch_size is not None:
        raise ValueError(
            "--batch-size is that of one rank and --global-batch-size that of all: "
            "give one of them"
        )
    if w.batch_size is not None:
        if w.batch_size < 1:
            raise ValueError(f"--batch-size {w.batch_size}: choose at least 1")
        return w.batch_size * w.world_size
    if w.global_batch_size is None:
        return preset.global_batch_size
    if w.global_batch_size < w.world_size:
        raise ValueError(
            f"a global batch of {w.global_batch_size} samples has not one for each of "
            f"{w.world_size} ranks"
        )
    return w.global_batch_size


def _learning_rate(w: Wishes, preset: Preset) -> float:
    usual = preset.learning_rate if w.optimizer == "sgd" else _ADAPTIVE_RATE
    rate = usual if w.learning_rate is None else w.learning_rate
    _in_range(rate, "--lr", 0.0, above=True)
    if w.lr_scaling == "none":
        return rate
    if w.batch_size is None:
        raise ValueError(
            f"--lr-scaling {w.lr_scaling} follows a global batch that grows with the "
            "ranks: give --batch-size, which is that of one rank"
        )
    factor = w.world_size if w.lr_scaling == "linear" else math.sqrt(w.world_size)
    return rate * factor


def _momentum(w: Wishes, preset: Preset) -> float:
    if w.optimizer != "sgd":
        if w.momentum is not None:
            raise ValueError(f"{w.optimizer} has no --momentum: that is for sgd")
        return 0.0
    momentum = preset.momentum if w.momentum is None else w.momentum
    return _in_range(momentum, "--momentum", 0.0, 1.0)


def _device(w: Wishes, num_gpus: int) -> Device:
    if w.device != "cuda":
        fits = w.device == "auto" and num_gpus >= w.world_size
        return "cuda" if fits else "cpu"
    if num_gpus == 0:
        raise ValueError(
            "--device cuda: torch sees no GPU here; --device cpu works everywhere"
        )
    if num_gpus < w.world_size:
        raise ValueError(
            f"--device cuda: {w.world_size} ranks need {w.world_size} GPUs, and torch "
            f"sees {num_gpus}; NCCL wants one for each rank"
        )
    return "cuda"
