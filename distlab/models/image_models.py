"""The image models by name, for a given number of classes, channels and pixels."""

from __future__ import annotations

import torch
from torch import nn

from distlab.given.seeds import small_seed
from distlab.models import resnet, vit

IMAGE_MODELS = (
    "narrow_resnet18",
    "resnet18",
    "resnet50",
    "narrow_vit",
    "vit_s_16",
    "vit_b_16",
)

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
