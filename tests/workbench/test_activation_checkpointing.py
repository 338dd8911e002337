"""The unit beside torch.utils.checkpoint, and its memory as the depth grows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from distlab.curriculum import load
from distlab.runner import RankContext
from distlab.saved_tensors import SavedTensors
from distlab.sim import run

UNIT = load("activation_checkpointing")
WIDTH, ROWS = 8, 16
Run = Callable[[nn.Module, Tensor], Tensor]
TORCHS = [
    partial(torch_checkpoint, use_reentrant=True),
    partial(torch_checkpoint, use_reentrant=False),
]


def make_blocks(depth: int) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(depth)
    ).double()


def step(how: Run, depth: int = 3) -> dict[str, Any]:
    blocks = make_blocks(depth)
    data = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with SavedTensors(blocks.parameters()) as kept:
        middle = data
        for block in blocks:
            middle = how(block, middle)
        held = kept.live
        middle.square().mean().backward()
    tensors = [middle, data.grad, *[p.grad for p in blocks.parameters()]]
    later = torch.rand(4)
    return {"bits": [*tensors, later], "held": held, "peak": kept.peak}


@pytest.mark.parametrize("theirs", [lambda block, x: block(x), *TORCHS])
def test_the_same_bits_as_torch_with_dropout_on(theirs: Run) -> None:
    ours, expected = step(UNIT.checkpoint), step(theirs)
    pairs = zip(ours["bits"], expected["bits"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_inputs_are_kept_and_at_the_peak_one_block() -> None:
    stored = ROWS * WIDTH * 8
    plain = {depth: step(lambda block, x: block(x), depth) for depth in (1, 6)}
    inside = plain[6]["held"] / 6
    for depth in (1, 2, 6):
        found = step(UNIT.checkpoint, depth)
        assert found["held"] == depth * stored
        # and what the loss keeps: the result, which pow saves
        assert found["peak"] <= (depth + 1) * stored + inside
    assert 6 * stored <= 0.1 * plain[6]["held"]


def test_the_first_block_learns_though_its_input_needs_no_gradient() -> None:
    (block,) = make_blocks(1)
    UNIT.checkpoint(block, torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_class_numbers_have_no_gradient() -> None:
    table = nn.Embedding(5, 3)
    UNIT.checkpoint(table, torch.tensor([1, 4])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum() == 6


def test_gradcheck_agrees_with_equal_factors_and_not_with_others() -> None:
    given = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: UNIT.Scale.apply(x, 3.0, 3.0), given)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda x: UNIT.Scale.apply(x, 1.0, 3.0), given)


def on_a_rank(context: RankContext) -> list[Tensor]:
    """Blocks with a message between them: other ranks have their turn there."""
    torch.manual_seed(context.rank)
    found = step(UNIT.checkpoint)["bits"]
    context.comm.all_reduce(found[0].detach().clone())
    return [tensor.detach() for tensor in found]


def test_simulated_ranks_compute_again_what_they_had() -> None:
    expected = step(lambda block, x: block(x))["bits"]
    for found in run(on_a_rank, 3).values:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
