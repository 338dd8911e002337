"""Read the trainer's options from flags and a recipe file, and check them together."""

from __future__ import annotations

import argparse
import functools
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from distlab.models.image_models import (
    IMAGE_MODELS,
    SMALLEST,
    TORCHVISION,
    torchvision_models,
)
from distlab.recipe.optimizers import OPTIMIZERS
from distlab.recipe.schedules import SCHEDULES
from distlab.transports import find_transport

PRECISIONS = ("fp32", "fp64", "bf16", "fp16")
COMPRESSIONS = ("none", "bf16", "fp16", "top_k", "int8", "powersgd")
CODES = ("auto", "mine", "reference")
FILES = Path(__file__).with_name("files")


def option(
    default: Any, text: str, choices: Sequence[str] = (), *, may_change: bool = False
) -> Any:
    """Make a field with a line of help.

    With `may_change`, you may set a new value when you resume from a checkpoint. All
    other options must have the values that the checkpoint was saved with.
    """
    metadata = {"help": text, "choices": choices, "may_change": may_change}
    return field(default=default, metadata=metadata)


_free = functools.partial(option, may_change=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what to train, and how. Each option has a flag, such as --global-batch-size.

    We refuse an option that would have no effect, alone or because of other options, or
    whose value differs from the one in the checkpoint.

    Raises:
        ValueError: two options contradict each other; the message is one line.
    """

    recipe: str = _free("", "TOML file with values for the flags you don't pass")
    data: str = _free(
        "digits", "digits, mnist, fashion-mnist, or the path of an image folder"
    )
    num_samples: int = option(0, "train on the first N samples only; 0 means all")
    num_classes: int = _free(
        0, "refuse data with any other number of classes; 0 means any"
    )
    image_size: int = option(0, "side of an image in pixels; 0 keeps the data's own")
    num_workers: int = _free(0, "number of processes per rank that load data")
    model: str = option("narrow_resnet18", "network to train", IMAGE_MODELS)
    engine: str = _free(
        "scratch", "what averages the gradients", ("scratch", "ddp", "fsdp2")
    )
    backend: str = _free(
        "", "such as gloo, nccl or tcp; nccl by default if there are GPUs"
    )
    code: str = _free(
        "auto", "whose units to run; auto takes each of yours that passes", CODES
    )
    seed: int = option(
        0, "seed of the weights, the shuffle and everything else that is random"
    )
    epochs: int = _free(1, "number of passes over the samples")
    max_steps: int = _free(0, "stop after this step; 0 means after the last epoch")
    global_batch_size: int = option(64, "samples per step, over all ranks together")
    grad_accum_steps: int = _free(1, "microbatches per step on each rank")
    optimizer: str = option("sgd", "optimizer", OPTIMIZERS)
    lr: float = option(0.1, "peak learning rate")
    momentum: float = option(0.9, "momentum of sgd and lars")
    weight_decay: float = option(0.0, "weight decay of all parameters")
    norm_weight_decay: float | None = option(
        None, "weight decay of biases and norms, if it differs"
    )
    schedule: str = option("cosine", "learning-rate schedule", SCHEDULES)
    warmup_epochs: float = option(
        0.0, "number of epochs over which the learning rate rises"
    )
    warmup_factor: float = option(
        0.01, "fraction of the learning rate in the first step"
    )
    step_epochs: float = option(30.0, "with --schedule step: epochs between two drops")
    clip_norm: float | None = option(None, "clip the gradient to this norm")
    label_smoothing: float = option(0.0, "ε of label smoothing")
    mixup: float = option(0.0, "α of mixup; 0 turns it off")
    cutmix: float = option(
        0.0, "α of cutmix; 0 turns it off. With mixup, each gets half"
    )
    ema: float = option(0.0, "decay of the weights' moving average; 0 turns it off")
    smallest_image: int = option(0, "start progressive resizing here; 0 turns it off")
    precision: str = option("fp32", "precision of the computation", PRECISIONS)
    channels_last: bool = _free(False, "keep images in memory as NHWC")
    compile: bool = _free(False, "compile the model with torch.compile")
    compression: str = option(
        "none", "compression of gradients, with scratch", COMPRESSIONS
    )
    checkpoint: str = _free("", "save to this folder, and continue from its newest one")
    save_every: int = _free(100, "save a checkpoint every N steps")
    records: str = _free(
        "", "write all ranks' records to this new folder, for distlab top"
    )
    also: str = _free("", "also send them to tensorboard, prometheus:PORT, otlp, …")
    profile: str = _free("", "write a profiler trace of each rank to this folder")
    log_every: int = _free(10, "print a line every N steps")

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_value(one.name, getattr(self, one.name), one.metadata["choices"])
        for is_wrong, why in self._contradictions():
            if is_wrong:
                raise ValueError(why)

    def _contradictions(self) -> list[tuple[bool, str]]:
        is_vit, sharded = "vit" in self.model, self.engine == "fsdp2"
        return [
            (
                self.compression != "none" and self.engine != "scratch",
                f"--compression {self.compression} with --engine {self.engine}: only "
                "scratch has compression hooks",
            ),
            (
                self.compression != "none" and self.precision == "fp64",
                f"--compression {self.compression} with --precision fp64: compressed "
                "gradients are float32",
            ),
            (
                self.engine != "scratch"
                and self.backend != ""
                and not find_transport(self.backend).is_torchs,
                f"--backend {self.backend} with --engine {self.engine}: torch's "
                "engines need gloo or nccl",
            ),
            (
                is_vit and self.channels_last,
                f"--channels-last with --model {self.model}: only the ResNets compute "
                "with convolutions",
            ),
            (
                is_vit and self.smallest_image > 0,
                f"--smallest-image with --model {self.model}: a ViT has one image size",
            ),
            (
                0 < self.smallest_image < SMALLEST.get(self.model, 0),
                f"--smallest-image {self.smallest_image} with --model {self.model}: "
                f"it takes {SMALLEST.get(self.model)} pixels or more",
            ),
            (
                sharded and self.precision == "fp16",
                "--engine fsdp2 with --precision fp16: choose bf16, which needs no "
                "loss scaler",
            ),
            (
                sharded and self.optimizer in ("lars", "lamb"),
                f"--engine fsdp2 with --optimizer {self.optimizer}: its trust ratios "
                "need whole layers",
            ),
            (
                self.warmup_epochs >= self.epochs,
                f"--warmup-epochs {self.warmup_epochs} with --epochs {self.epochs}: "
                "the warm-up leaves no step",
            ),
        ]

    def check_ranks(self, world_size: int) -> None:
        """Require that every rank has a sample in every microbatch.

        Raises:
            ValueError: some rank would have none.
        """
        fewest = self.global_batch_size // world_size
        if fewest < self.grad_accum_steps:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} gives a rank of "
                f"{world_size} {fewest} samples, fewer than its "
                f"{self.grad_accum_steps} microbatches"
            )


_AT_LEAST_1 = (
    "epochs", "global_batch_size", "grad_accum_steps", "save_every", "log_every",
)  # fmt: skip
_AT_LEAST_0 = (
    "num_samples", "num_classes", "image_size", "num_workers", "seed", "max_steps",
    "lr", "momentum", "weight_decay", "warmup_epochs", "label_smoothing", "mixup",
    "cutmix", "ema", "smallest_image", "step_epochs", "warmup_factor",
)  # fmt: skip


_NEEDS: dict[str, tuple[str, Callable[[Options], bool]]] = {
    "momentum": ("--optimizer sgd or lars", lambda o: o.optimizer in ("sgd", "lars")),
    "warmup_factor": ("--warmup-epochs", lambda o: o.warmup_epochs > 0),
    "step_epochs": ("--schedule step", lambda o: o.schedule == "step"),
    "save_every": ("--checkpoint", lambda o: bool(o.checkpoint)),
    "also": ("--records", lambda o: bool(o.records)),
}
"""Map options that have no effect alone to the option that they need."""


def _require_use(options: Options, given: Iterable[str]) -> None:
    """Require that every given option has an effect.

    Raises:
        ValueError: an option has none; the message names the option that it needs.
    """
    for name in given:
        needed, is_there = _NEEDS.get(name, ("", lambda _: True))
        if not is_there(options):
            value = getattr(options, name)
            raise ValueError(f"{flag_of(name)} {value} has no effect without {needed}")


def settings_of(options: Options) -> dict[str, Any]:
    """Return the settings that must stay the same when you resume from a checkpoint."""
    return {
        one.name: getattr(options, one.name)
        for one in fields(options)
        if not one.metadata["may_change"]
    }


def require_same(
    folder: str, own: Mapping[str, Any], saved: Mapping[str, Any] | None
) -> None:
    """Require that a resumed run has the settings that its checkpoint was saved with.

    If an option didn't exist yet when the checkpoint was saved, we assume its default.

    Raises:
        ValueError: a setting differs, or the checkpoint has none. The message names the
            first that differs, with both values.
    """
    if saved is None:
        raise ValueError(
            f"--checkpoint {folder}: it doesn't say which flags it was saved with, "
            "because an older distlab wrote it; use a new folder"
        )
    defaults = {one.name: one.default for one in fields(Options)}
    for name, value in own.items():
        before, flag = saved.get(name, defaults[name]), flag_of(name)
        if before != value:
            was = f"without {flag}" if before is None else f"with {flag} {before}"
            now = "without it" if value is None else f"with {value}"
            raise ValueError(
                f"--checkpoint {folder}: it was saved {was}, but you are training {now}"
            )


def _check_value(name: str, value: Any, choices: Sequence[str]) -> None:
    """Require that one option is valid by itself."""
    flag = flag_of(name)
    is_elsewhere = name == "model" and value.startswith(TORCHVISION)
    if choices and value not in choices and not is_elsewhere:
        raise ValueError(f"{flag} {value}: choose one of {', '.join(choices)}")
    if name in _AT_LEAST_1 and value < 1:
        raise ValueError(f"{flag} {value}: must be at least 1")
    if name in _AT_LEAST_0 and not 0 <= value < math.inf:
        raise ValueError(f"{flag} {value}: must be at least 0")
    if name == "norm_weight_decay" and value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{flag} {value}: must be at least 0")
    if name == "seed" and value >= 1 << 32:
        raise ValueError(f"{flag} {value}: must be less than {1 << 32}")
    if name in ("label_smoothing", "ema") and value >= 1:
        raise ValueError(f"{flag} {value}: must be less than 1")
    if name == "clip_norm" and value is not None and not 0 < value < math.inf:
        raise ValueError(f"{flag} {value}: must be positive and finite")


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


ALIASES = {"records": ("--monitor",)}
"""Second names of options, so that they match the flags of other commands."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def format_help(self) -> str:
        """Add torchvision's models, which take a moment to import."""
        names = torchvision_models()
        self.epilog = (
            "torchvision isn't installed here; to get it: pip install torchvision"
        )
        if names:
            listed = textwrap.fill(", ".join(names), 78, initial_indent="  ")
            self.epilog = f"torchvision's models, after {TORCHVISION}:\n{listed}"
        return super().format_help()


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Return the options from the flags, else the recipe file, else the defaults.

    Raises:
        ValueError: a flag or a value is unknown, or they contradict each other, or one
            has no effect.
    """
    parser = _Parser(
        description="Train an image classifier on several ranks.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    types_of = typing.get_type_hints(Options)
    for one in fields(Options):
        kind = _plain(types_of[one.name])
        how: dict[str, Any] = {"type": kind}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        default = one.default if one.default is not MISSING else None
        text = one.metadata["help"]
        if choices := one.metadata["choices"]:
            text += f": {', '.join(choices)}"
        if one.name == "model":
            text += f", or one of torchvision's, such as {TORCHVISION}resnet50"
        if default not in ("", None):
            text += f" ({default})"
        flags = [flag_of(one.name), *ALIASES.get(one.name, ())]
        parser.add_argument(
            *flags, default=None, dest=one.name, help=text.replace("%", "%%"), **how
        )
    known = vars(parser.parse_args(arguments))
    given = {name: value for name, value in known.items() if value is not None}
    from_file = read_recipe(given["recipe"]) if given.get("recipe") else {}
    if from_file:
        _require_use(Options(**from_file), from_file)
    options = Options(**{**from_file, **given})
    _require_use(options, given)
    return options


def recipe_path(name: str) -> Path:
    """Return the recipe file at this path, or the one of this name in distlab.

    Raises:
        ValueError: there is none.
    """
    for path in (Path(name), FILES / name, FILES / f"{name}.toml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in FILES.glob("*.toml")))
    raise ValueError(f"--recipe {name}: no such file; distlab comes with {shipped}")


def read_recipe(name: str) -> dict[str, Any]:
    """Read the options in table [train] of a recipe file.

    Raises:
        ValueError: the file can't be read, or an option is unknown or of a wrong type.
    """
    path = recipe_path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("train")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--recipe {name}: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"--recipe {name}: it has no table [train]")
    types_of = typing.get_type_hints(Options)
    for key, value in table.items():
        if key not in types_of or key == "recipe":
            raise ValueError(f"--recipe {name}: [train] has an unknown option {key!r}")
        kind = _plain(types_of[key])
        is_right = isinstance(value, (int, float) if kind is float else kind)
        if not is_right or (isinstance(value, bool) and kind is not bool):
            raise ValueError(
                f"--recipe {name}: {key} is {value!r}, expected a {kind.__name__}"
            )
    return dict(table)


def _plain(kind: Any) -> type:
    """Return `float` for `float | None`."""
    if isinstance(kind, types.UnionType):
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    assert isinstance(kind, type)
    return kind
