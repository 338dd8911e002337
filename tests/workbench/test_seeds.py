"""Seeds as people have them: 64 bits and more, negative, numbers of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distlab.checkpoints.training_state import seed_all
from distlab.models.mlp import make_mlp
from distlab.seeds import small_seed

LARGE = [2**32, 2**63, 2**64 + 1, 2**200, -1, -(2**63), np.uint64(2**63 + 5)]


def test_seeds_of_32_bits_stay_and_others_get_them() -> None:
    assert [small_seed(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    found = [small_seed(seed) for seed in LARGE]
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in found)
    assert len({*found, small_seed(0), small_seed(1)}) == len(LARGE) + 2
    assert [small_seed(int(seed)) for seed in LARGE] == found


@pytest.mark.parametrize("seed", [*LARGE, np.int64(7)])
def test_a_training_starts_from_any_integer(seed: Any) -> None:
    def drawn(seed: Any) -> tuple[float, float, float]:
        seed_all(seed)
        weights = next(make_mlp(seed=seed).parameters()).detach()
        return float(torch.rand(())), float(np.random.random()), float(weights[0, 0])

    first = drawn(seed)
    assert first == drawn(int(seed))
    assert all(one != other for one, other in zip(first, drawn(8), strict=True))


@pytest.mark.parametrize("seed", [0.5, None, "7"])
def test_nothing_else_is_a_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed.*{seed!r}"):
        seed_all(seed)
