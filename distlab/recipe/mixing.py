"""Training on mixtures of two images, with soft targets; the loss for these.

Random numbers are those of torch's default generator, so a checkpoint that restores it
continues with the same mixtures.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def soft_targets(targets: Tensor, num_classes: int) -> Tensor:
    """(N,) classes to (N, num_classes) probabilities in float32; others unchanged.

    Raises:
        ValueError: a class isn't in 0 … num_classes - 1.
    """
    if targets.dim() == 2:
        return targets
    for target in (int(targets.min()), int(targets.max())) if len(targets) else ():
        if not 0 <= target < num_classes:
            raise ValueError(
                f"a target is class {target}, but the model has {num_classes} classes"
            )
    return functional.one_hot(targets, num_classes).float()


def mixup(
    inputs: Tensor, targets: Tensor, num_classes: int, alpha: float
) -> tuple[Tensor, Tensor]:
    """Mix each image with another of the batch, pixel by pixel; targets alike.

    λ is drawn from Beta(alpha, alpha): x = λ x_i + (1 - λ) x_j, the same for targets.

    Source: Zhang et al., mixup (arXiv 1710.09412), section 2; one λ for a batch, as in
    the authors' code.
    """
    share, other = _beta(alpha), torch.randperm(len(inputs), device=inputs.device)
    soft = soft_targets(targets, num_classes)
    mixed = share * inputs + (1 - share) * inputs[other]
    return mixed, share * soft + (1 - share) * soft[other]


def cutmix(
    inputs: Tensor, targets: Tensor, num_classes: int, alpha: float
) -> tuple[Tensor, Tensor]:
    """Replace a box of each image by that of another; targets by the share of area.

    Source: Yun et al., CutMix (arXiv 1905.04899), section 3.1, equations 1 and 2.
    """
    share, other = _beta(alpha), torch.randperm(len(inputs), device=inputs.device)
    soft = soft_targets(targets, num_classes)
    height, width = inputs.shape[-2:]
    top, bottom = _span(height, share)
    left, right = _span(width, share)
    mixed = inputs.clone()
    mixed[..., top:bottom, left:right] = inputs[other, ..., top:bottom, left:right]
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, kept * soft + (1 - kept) * soft[other]


def _beta(alpha: float) -> float:
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, must be positive")
    both = torch.tensor([alpha, alpha], dtype=torch.float64)
    return float(torch._sample_dirichlet(both)[0])


def _span(size: int, share: float) -> tuple[int, int]:
    """A part of sqrt(1 - share) of `size` at a random place, cut at the edges."""
    half = int(size * (1 - share) ** 0.5) // 2
    centre = int(torch.randint(size, ()))
    return max(0, centre - half), min(size, centre + half)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy of (N, C) logits against classes or soft targets.

    With smoothing ε each target is (1 - ε) of itself and ε / C of every class.

    Source: Szegedy et al., Rethinking the Inception Architecture (arXiv 1512.00567),
    section 7.
    """
    if targets.dim() == 2:
        targets = targets.to(logits.dtype)
    return functional.cross_entropy(logits, targets, label_smoothing=smoothing)


def resized(inputs: Tensor, size: int) -> Tensor:
    """The images at size × size pixels; unchanged if they have this size."""
    if inputs.shape[-1] == size:
        return inputs
    return functional.interpolate(
        inputs, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
