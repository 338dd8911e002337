"""Load real handwritten digits, 8×8 pixels each, from inside scikit-learn's wheel.

Source: UCI, Optical Recognition of Handwritten Digits (1998), the part that
scikit-learn ships: 1,797 images. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NUM_HELD_OUT = 360
_BRIGHTEST = 16.0  # pixels are counts 0 … 16


@dataclass(frozen=True)
class Digits:
    """A split of the digits; inputs are (N, 64) float64 in [0, 1], targets (N,)."""

    train_inputs: Tensor
    train_targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor


def load_digits_split(seed: int = 0) -> Digits:
    """Load 1,437 images to train on and 360 held out, split by the seed.

    You get your own copy of the tensors, so you may change them.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    table = _read_table()
    order = np.random.default_rng(seed).permutation(len(table))
    inputs = torch.from_numpy(table[order, :-1] / _BRIGHTEST)
    targets = torch.from_numpy(table[order, -1].astype(np.int64))
    return Digits(
        train_inputs=inputs[NUM_HELD_OUT:],
        train_targets=targets[NUM_HELD_OUT:],
        held_out_inputs=inputs[:NUM_HELD_OUT],
        held_out_targets=targets[:NUM_HELD_OUT],
    )


@functools.cache
def _read_table() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """One row per image: 64 pixels and the digit.

    Reading the file takes 10 ms; importing scikit-learn for it would take a second on
    every rank, so that is only done where the file is not in its usual place.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn"
        )
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",", ndmin=2)
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images = load_digits()
    return np.column_stack([images.data, images.target])
