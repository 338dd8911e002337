"""The image models by name, for a given number of classes, channels and pixels."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch
from torch import nn

from distlab.models import resnet, vit
from distlab.seeds import small_seed

IMAGE_MODELS = (
    "narrow_resnet18",
    "resnet18",
    "resnet50",
    "narrow_vit",
    "vit_s_16",
    "vit_b_16",
)

TORCHVISION = "torchvision/"
"""Before a name: the model is torchvision's of that name."""

SMALLEST = {"narrow_resnet18": 8, "resnet18": 32, "resnet50": 32}
"""Pixels of a side. On smaller images the last layers have less than one pixel left;
torch 2.13 then gives wrong gradients in bfloat16 on a CPU (nan, now and then)."""


def make_image_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 224,
    seed: int = 0,
) -> nn.Module:
    """(N, in_channels, image_size, image_size) to (N, num_classes), in float32.

    The same seed gives the same weights; torch's own generator is left as it was.

    Raises:
        ValueError: no such model, or images of a size that it does not take.
    """
    if name.startswith(TORCHVISION):
        return _of_torchvision(name, num_classes, in_channels, seed)
    if name not in IMAGE_MODELS:
        raise ValueError(f"no model is called {name!r}: {', '.join(IMAGE_MODELS)}")
    if name in ("vit_s_16", "vit_b_16") and image_size != 224:
        raise ValueError(f"{name} takes images of 224 × 224 pixels, not {image_size}")
    if image_size < (least := SMALLEST.get(name, 0)):
        raise ValueError(
            f"{name} takes images of {least} × {least} pixels or more, not {image_size}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small_seed(seed))
        if name == "narrow_vit":
            return vit.narrow_vit(num_classes, in_channels, image_size)
        module = vit if name.startswith("vit") else resnet
        make = getattr(module, name)
        model: nn.Module = make(num_classes, in_channels)
        return model


def torchvision_models() -> list[str]:
    """The names of torchvision's image classifiers; none if it isn't installed."""
    try:
        models: Any = importlib.import_module("torchvision").models
    except ImportError:
        return []
    return sorted(models.list_models(module=models))


def _of_torchvision(
    name: str, num_classes: int, in_channels: int, seed: int
) -> nn.Module:
    """One of torchvision's models with new weights.

    Raises:
        ValueError: torchvision isn't installed, has no such model, or the images
            have no three channels.
    """
    own = name.removeprefix(TORCHVISION)
    known = torchvision_models()
    if not known:
        raise ValueError(
            f"the model {name} needs torchvision, which is not installed: pip install "
            "torchvision"
        )
    if own not in known:
        near = difflib.get_close_matches(own, known, n=1)
        hint = f"did you mean {TORCHVISION}{near[0]}?" if near else ", ".join(known)
        raise ValueError(f"torchvision has no model called {own!r}: {hint}")
    if in_channels != 3:
        raise ValueError(
            f"the model {name} takes images with 3 channels, but these have "
            f"{in_channels}"
        )
    models: Any = importlib.import_module("torchvision").models
    # In training these two would return a second output for an auxiliary loss.
    more: dict[str, Any] = {}
    if own in ("googlenet", "inception_v3"):
        more = {"aux_logits": False, "init_weights": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small_seed(seed))
        model: nn.Module = models.get_model(
            own, weights=None, num_classes=num_classes, **more
        )
        return model
