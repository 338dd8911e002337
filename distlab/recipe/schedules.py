"""The learning rate in each step, and the image size in each epoch: pure functions."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "step", "constant")


def learning_rate_factor(
    step: int,
    *,
    num_steps: int,
    warmup_steps: int = 0,
    schedule: str = "cosine",
    first: float = 0.01,
    last: float = 0.0,
    step_size: int = 0,
    gamma: float = 0.1,
) -> float:
    """What the learning rate is multiplied by in `step`, counted from 0.

    It rises in a line from `first` to 1 during the warm-up. After it, "cosine" falls to
    `last` at num_steps, and "step" is multiplied by gamma every `step_size` steps,
    counted from step 0.

    Source: Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), section
    2.2, for the warm-up; Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5,
    without restarts, for the cosine; He et al. (arXiv 1512.03385), section 3.4, for
    steps.

    Raises:
        ValueError: no such schedule, or the warm-up leaves no step.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"no schedule is called {schedule!r}: {', '.join(SCHEDULES)}")
    if not 0 <= warmup_steps < max(num_steps, 1):
        raise ValueError(
            f"the warm-up takes {warmup_steps} steps, the training {num_steps}"
        )
    if step < warmup_steps:
        return first + (1 - first) * step / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return float(gamma ** (step // step_size if step_size else 0))
    part = min(1.0, (step - warmup_steps) / (num_steps - warmup_steps))
    return last + (1 - last) * (1 + math.cos(math.pi * part)) / 2


def image_size(
    epoch: int, *, num_epochs: int, smallest: int, largest: int, multiple: int = 4
) -> int:
    """The side of the images in `epoch`, counted from 0: progressive resizing.

    It is `smallest` for the first third of the epochs, `largest` for the last, and
    grows in a line between them, in steps of `multiple` pixels. Evaluation always has
    `largest`.

    Source: Howard, in Coleman et al., DAWNBench (2018), for growing images; Tan and Le,
    EfficientNetV2 (arXiv 2104.00298), section 4, for the line.
    """
    if not 0 < smallest <= largest:
        raise ValueError(f"image sizes grow from {smallest} to {largest} pixels")
    part = (epoch / max(1, num_epochs) - 1 / 3) * 3
    part = min(1.0, max(0.0, part))
    size = smallest + part * (largest - smallest)
    return min(largest, max(smallest, int(size // multiple) * multiple))
