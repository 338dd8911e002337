"""The two numbers behind MFU: a model's operations per sample, and a machine's peak."""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_BACKWARD = 2.0  # each matrix product of the forward has two in the backward
_SIDE = 1024  # of the matrices that a peak is measured with
_TRIES = 5

DENSE_BF16_PEAK = {
    "H200": 989.4e12,  # https://www.nvidia.com/en-us/data-center/h200/, SXM
    "H100": 989.4e12,  # https://www.nvidia.com/en-us/data-center/h100/, SXM
    "A100": 312e12,  # https://www.nvidia.com/en-us/data-center/a100/
}
"""Operations per second in bfloat16 without sparsity, as NVIDIA states them: half of
the number with sparsity on its pages. We look them up by a part of the device's
name."""


def flops_per_sample(model: nn.Module, inputs: Tensor) -> float:
    """Return the operations of forward and backward for one sample of `inputs`.

    torch counts them on a copy of the model, so the model's buffers and random numbers
    don't change. We assume that backward takes twice as many as forward.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        counter = FlopCounterMode(display=False)
        with counter:
            copy.deepcopy(model)(inputs)
    return counter.get_total_flops() * (1 + _BACKWARD) / len(inputs)


def peak_flops(device: torch.device) -> float:
    """Return one device's operations per second, as stated by its maker or measured.

    We measure with products of 1,024 × 1,024 float32 matrices and take the fastest of
    five. On a CPU, we use all cores that this process may use.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, stated in DENSE_BF16_PEAK.items():
            if part in name:
                return stated
    left, right = torch.randn(2, _SIDE, _SIDE, device=device).unbind()
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        (left @ right).sum().item()  # reading it waits for a GPU
        seconds.append(time.perf_counter() - started)
    return 2 * _SIDE**3 / min(seconds)
