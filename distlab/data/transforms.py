"""Turn an image into a model's input, at random for training, fixed for evaluation.

Source: C. Szegedy et al., Going Deeper with Convolutions (CVPR 2015), section 6, for
the random resized crop; A. Krizhevsky et al., ImageNet Classification with Deep
Convolutional Neural Networks (NeurIPS 2012), section 4.1, for flips and the centre.

A transform returns uint8 (C, S, S), a quarter of float32's bytes on the way from the
data workers to the device. `normalized` converts a batch to float where you use it. All
randomness comes from the `random.Random` that you pass, so that an image is the
same again when you resume a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from distlab.data.decode import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's pixels in [0, 1], by channel, which all models use."""

_TRIES = 10
_LONGEST = 16  # times as long as wide
Region = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels, without the right and bottom edge."""


class Transform(Protocol):
    """Interface of a data set's transform; all its results have shape `shape`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        ...

    def __call__(self, image: Image, random: Random) -> Tensor:
        """Uint8 (C, S, S) of an opened image; ImageError if it cannot be decoded."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """Takes a random region, resizes it to size × size, and flips half of them.

    `area` and `aspect` bound the region's share of the image, and its width by height.
    With `draft`, we decode a large JPEG at 1/2, 1/4 or 1/8 of its size if the region
    still has size × size pixels. This is much less work, but pixels differ slightly.
    """

    size: int = 224
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    channels: int = 3
    draft: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        return self.channels, self.size, self.size

    def __call__(self, image: Image, random: Random) -> Tensor:
        """Uint8 (C, S, S)."""
        from PIL.Image import Resampling, Transpose

        region = random_region(image.size, self.area, self.aspect, random)
        is_flipped = random.random() < self.flip
        if self.draft:
            region = _drafted(image, region, self.size)
        small = to_rgb(image).crop(region)
        small = small.resize((self.size, self.size), Resampling.BILINEAR)
        if is_flipped:
            small = small.transpose(Transpose.FLIP_LEFT_RIGHT)
        return pixels(small, self.channels)


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """Resizes the shorter side to `resize`, and takes the centre of size × size."""

    size: int = 224
    resize: int = 256
    channels: int = 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        return self.channels, self.size, self.size

    def __call__(self, image: Image, random: Random | None = None) -> Tensor:
        """Uint8 (C, S, S); `random` is not used."""
        from PIL.Image import Resampling

        image = _shortened(to_rgb(image))
        width, height = image.size
        short = min(width, height)
        wide = (self.resize * width // short, self.resize * height // short)
        left = round((wide[0] - self.size) / 2)
        top = round((wide[1] - self.size) / 2)
        resized = image.resize(wide, Resampling.BILINEAR)
        centre = resized.crop((left, top, left + self.size, top + self.size))
        return pixels(centre, self.channels)


def _shortened(image: Image) -> Image:
    """The middle of an image that is far longer than wide: its ends are cut off.

    One pixel by a million would be resized to as many times 256.
    """
    width, height = image.size
    most = _LONGEST * min(width, height)
    if max(width, height) <= most:
        return image
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    return image.crop((left, top, width - left, height - top))


def random_region(
    size: tuple[int, int],
    area: tuple[float, float],
    aspect: tuple[float, float],
    random: Random,
) -> Region:
    """Draw a region of an image of `size` (width, height) for training.

    Try ten times to draw an area and an aspect, whose logarithm is uniform. Then take
    the centre, with the aspect nearest to the image's.
    """
    width, height = size
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(_TRIES):
        part = width * height * random.uniform(*area)
        ratio = math.exp(random.uniform(low, high))
        wide = round(math.sqrt(part * ratio))
        tall = round(math.sqrt(part / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left = random.randint(0, width - wide)
            top = random.randint(0, height - tall)
            return left, top, left + wide, top + tall
    ratio = min(max(width / height, aspect[0]), aspect[1])
    wide = min(width, max(1, round(height * ratio)))
    tall = min(height, max(1, round(width / ratio)))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


def _drafted(image: Image, region: Region, size: int) -> Region:
    """Let a JPEG be decoded smaller; the region in the pixels of what then comes."""
    width, height = image.size
    wide, tall = region[2] - region[0], region[3] - region[1]
    # Pillow takes the smallest scale whose image is at least so large. One pixel more:
    # at the edge of a region half a pixel may be lost.
    asked = (width * (size + 1) // wide, height * (size + 1) // tall)
    if asked[0] >= width or asked[1] >= height or not image.draft(None, asked):
        return region
    across, down = image.size[0] / width, image.size[1] / height
    left, top = int(region[0] * across), int(region[1] * down)
    right = min(image.size[0], max(left + 1, round(region[2] * across)))
    bottom = min(image.size[1], max(top + 1, round(region[3] * down)))
    return left, top, right, bottom


def pixels(image: Image, channels: int = 3) -> Tensor:
    """Convert an RGB image to uint8 (C, H, W); one channel means its brightness."""
    import numpy as np

    if channels == 1:
        return torch.from_numpy(np.array(image.convert("L"))).unsqueeze(0)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def normalized(
    images: Tensor,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert uint8 (N, C, H, W) to `dtype`: (pixel / 255 - mean) / std, by channel."""
    channels = images.shape[1]
    shift = torch.tensor(mean[:channels], dtype=dtype, device=images.device)
    scale = torch.tensor(std[:channels], dtype=dtype, device=images.device)
    shape = (1, channels, 1, 1)
    return images.to(dtype).div_(255).sub_(shift.view(shape)).div_(scale.view(shape))
