"""Build the parts of a training job from its options and the course's units."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distlab.comm import ByteMeter, Comm
from distlab.curriculum.choose import as_side
from distlab.data.images import Images
from distlab.data.loader import ImageLoader
from distlab.data.trainer_sets import ImageSets, open_sets
from distlab.data.transforms import normalized
from distlab.distributed.environment import read_local_rank
from distlab.distributed.group import default_comm, init_process_group
from distlab.distributed.parts import forget, unit
from distlab.distributed.wrapped import Wrapped, wrap
from distlab.given import gradient_compression as compression
from distlab.given.imagenet_trainer import FullBatches, Job, NoAverage, NoScaler
from distlab.models.image_models import make_image_model
from distlab.recipe import mixing
from distlab.recipe.average import WeightAverage
from distlab.recipe.optimizers import make_optimizer
from distlab.recipe.options import Options, settings_of
from distlab.recipe.schedules import image_size, learning_rate_factor

HELD_OUT_BATCH = 500  # samples of one batch of an evaluation, on all ranks together
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def use_code(code: str) -> None:
    """Use the learner's units from now on, or the reference's, or whichever passes."""
    forget(as_side(code, "--code"))


def start(options: Options) -> Comm:
    """Meet the other ranks if a launcher started this one; otherwise run alone.

    Raises:
        ValueError: the environment or the backend is wrong.
    """
    is_alone = not any(name in os.environ for name in ("RANK", "SLURM_PROCID"))
    backend = options.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and torch.cuda.is_available():
        torch.cuda.set_device(read_local_rank())
    if is_alone:
        init_process_group(backend, world_size=1, rank=0)
    else:
        init_process_group(backend)
    return ByteMeter(default_comm())


def build(options: Options, comm: Comm) -> Job:
    """Build the job on this rank; collective.

    Raises:
        ValueError: the options don't fit the data or the number of ranks.
    """
    options.check_ranks(comm.world_size)
    sets = open_sets(
        options.data, options.num_samples, options.image_size, options.seed
    )
    if options.num_classes not in (0, sets.num_classes):
        raise ValueError(
            f"--num-classes {options.num_classes}: {options.data} has "
            f"{sets.num_classes} classes"
        )
    if options.smallest_image > _side(options, sets):
        raise ValueError(
            f"--smallest-image {options.smallest_image}: the images are only "
            f"{_side(options, sets)} pixels wide"
        )
    model = _model(options, sets, comm)
    hook = _hook(options.compression)
    engine = wrap(options.engine, model, comm, hook)
    size = options.global_batch_size
    loader = FullBatches(_loader(options, sets.train, comm, size, shuffle=True))
    optimizer = make_optimizer(
        options.optimizer,
        model,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        norm_weight_decay=options.norm_weight_decay,
    )
    loss_fn = functools.partial(mixing.cross_entropy, smoothing=options.label_smoothing)
    has_scaler = options.precision == "fp16"
    return Job(
        comm=comm,
        model=model,
        engine=engine,
        optimizer=optimizer,
        scheduler=_scheduler(options, optimizer, loader.num_full),
        loader=loader,
        loss_fn=loss_fn,
        evaluate=_evaluation(options, sets, comm, engine),
        scaler=unit("mixed_precision").LossScaler(comm) if has_scaler else NoScaler(),
        average=WeightAverage(model, options.ema) if options.ema else NoAverage(),
        hook=hook,
        clip_norm=options.clip_norm or float("inf"),
        grad_accum_steps=options.grad_accum_steps,
        autocast=_autocast(options, comm.device),
        prepare=_preparation(options, sets, comm.device),
        settings=settings_of(options) | {"data": sets.identity},
    )


def _dtype(options: Options) -> torch.dtype:
    return torch.float64 if options.precision == "fp64" else torch.float32


def _side(options: Options, sets: ImageSets) -> int:
    return options.image_size or sets.image_size


def _model(options: Options, sets: ImageSets, comm: Comm) -> nn.Module:
    model = make_image_model(
        options.model,
        num_classes=sets.num_classes,
        in_channels=sets.channels,
        image_size=_side(options, sets),
        seed=options.seed,
    ).to(comm.device, _dtype(options))
    if options.channels_last:
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    if options.compile:
        model.compile()
    return model


def _hook(name: str) -> Any:
    """Return a hook of unit gradient_compression, or one that we provide."""
    if name == "none":
        return None
    if name in _HALF:
        return getattr(compression, name)
    kinds = {"top_k": "TopK", "int8": "Int8", "powersgd": "PowerSGD"}
    return getattr(unit("gradient_compression"), kinds[name])()


def _loader(
    options: Options, samples: Any, comm: Comm, size: int, *, shuffle: bool
) -> Any:
    """Return the loader of unit data_loader, or one that decodes a folder of images."""
    if isinstance(samples, Images):
        return ImageLoader(
            samples,
            size,
            comm.rank,
            comm.world_size,
            is_train=shuffle,
            seed=options.seed,
            num_workers=options.num_workers,
        )
    return unit("data_loader").DistributedDataLoader(
        samples,
        size,
        comm.rank,
        comm.world_size,
        shuffle=shuffle,
        seed=options.seed,
        num_workers=options.num_workers if shuffle else 0,
    )


def _scheduler(
    options: Options, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR:
    """Return the schedule of the learning rate; an epoch has `steps` steps."""
    factor = functools.partial(
        learning_rate_factor,
        num_steps=options.epochs * steps,
        warmup_steps=round(options.warmup_epochs * steps),
        schedule=options.schedule,
        first=options.warmup_factor,
        step_size=round(options.step_epochs * steps),
    )
    return Schedule(optimizer, lambda step: factor(step))


class Schedule(LambdaLR):
    """A schedule that uses its own rates even after loading another run's state.

    A resumed run may train for more epochs, and its rates then differ from the saved
    ones.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step, with the rate that this schedule has there."""
        super().load_state_dict(state_dict)
        rates = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


def _autocast(
    options: Options, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    if options.precision not in _HALF:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, device.type, _HALF[options.precision])


def _evaluation(
    options: Options, sets: ImageSets, comm: Comm, engine: Wrapped
) -> Callable[[nn.Module], Any]:
    """Return a function for exact metrics over all ranks' held-out samples."""
    held_out = _loader(options, sets.held_out, comm, HELD_OUT_BATCH, shuffle=False)
    prepare = _to_device(options, sets, comm.device)

    def evaluate(_: nn.Module) -> Any:
        batches = (prepare(*batch[:2]) for batch in held_out)
        loss_fn = nn.functional.cross_entropy
        with _autocast(options, comm.device)():
            return unit("trainer").evaluate(comm, engine.whole(), loss_fn, batches)

    return evaluate


Prepared = tuple[Tensor, Tensor]


def _to_device(
    options: Options, sets: ImageSets, device: torch.device
) -> Callable[[Tensor, Tensor], Prepared]:
    """Return a function that puts a batch on the device, in the form the model needs.

    That includes the dtype, the image size and the memory format.
    """
    dtype, side = _dtype(options), _side(options, sets)

    def prepare(images: Tensor, targets: Tensor) -> Prepared:
        images = images.to(device, non_blocking=True)
        is_decoded = images.dtype == torch.uint8
        images = normalized(images, dtype=dtype) if is_decoded else images.to(dtype)
        images = mixing.resized(images, side) if len(images) else images
        if options.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets.to(device, non_blocking=True)

    return prepare


def _preparation(
    options: Options, sets: ImageSets, device: torch.device
) -> Callable[[Tensor, Tensor, int], Prepared]:
    """Return a function that resizes training images and mixes pairs of them."""
    to_device, side = _to_device(options, sets, device), _side(options, sets)
    mixtures = []
    for mix, alpha in ((mixing.mixup, options.mixup), (mixing.cutmix, options.cutmix)):
        if alpha:
            mixtures.append(
                functools.partial(mix, num_classes=sets.num_classes, alpha=alpha)
            )

    def prepare(images: Tensor, targets: Tensor, epoch: int) -> Prepared:
        images, targets = to_device(images, targets)
        if options.smallest_image:
            now = image_size(
                epoch,
                num_epochs=options.epochs,
                smallest=options.smallest_image,
                largest=side,
            )
            images = mixing.resized(images, now)
        if mixtures:
            chosen = int(torch.randint(len(mixtures), ()))
            images, targets = mixtures[chosen](images, targets)
        return images, targets

    return prepare
