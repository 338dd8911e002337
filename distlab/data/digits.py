"""Load real handwritten digits, 8×8 pixels each, from the file beside this one.

`digits.csv.gz` has one line per image: 64 pixels and the digit. Its 1,797 images are
the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits
(1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, which is
licensed under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). The lines are
unchanged, and in the order of scikit-learn's `load_digits`.
"""

from __future__ import annotations

import functools
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
    """Return (1797, 65) numbers: in each row 64 pixels and the digit."""
    path = Path(__file__).with_name("digits.csv.gz")
    return np.loadtxt(path, delimiter=",", ndmin=2)
