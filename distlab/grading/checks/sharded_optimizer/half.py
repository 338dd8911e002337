"""One step of a model in bfloat16: what is sent has two bytes per element, not four.

All gradients are whole numbers that bfloat16 can add up and divide without an error.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

ROWS, COLUMNS = 41, 50
SLACK = 256  # bytes for a norm, a loss and the like
SETTINGS = {"lr": 1.0, "weight_decay": 0.0}
UNIT = 144  # its half, third, quarter, and sums of a few, are whole


def drawn(rank: int) -> Tensor:
    """A rank's gradient: multiples of UNIT, at most 3 of them."""
    places = torch.arange(ROWS * COLUMNS) + rank
    return (UNIT * (1 + places % 3)).view(ROWS, COLUMNS).to(torch.bfloat16)


def step_in_half(
    context: RankContext, unit: ModuleType, *, stage: int
) -> dict[str, Any]:
    """The stage reduces drawn gradients, and takes a step from zero."""
    comm = context.comm
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    layer.weight.data.zero_()
    model = nn.Sequential(layer)
    groups = [{"params": [layer.weight], **SETTINGS}]
    zero = unit.ShardedOptimizer(comm, model, groups, make_sgd)
    if stage == 2:
        unit.ShardedGradients(zero)
    layer.weight.grad = drawn(comm.rank)
    start = context.traffic.sent_bytes
    zero.reduce_gradients()
    reduced = context.traffic.sent_bytes
    zero.step()
    sent = [reduced - start, context.traffic.sent_bytes - reduced]
    return {"weight": layer.weight.detach().float(), "sent": sent}


def make_sgd(groups: Any) -> torch.optim.Optimizer:
    """Weights that were zero become the gradient, times -1."""
    return torch.optim.SGD(groups, lr=1.0)


def forward_in_half(context: RankContext, unit: ModuleType) -> float:
    """The bytes that a forward at stage 3 sends."""
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(layer)
    groups = [{"params": [layer.weight], **SETTINGS}]
    zero = unit.ShardedOptimizer(context.comm, model, groups, make_sgd)
    unit.FullySharded(zero, unit.ShardedGradients(zero))
    start = context.traffic.sent_bytes
    with torch.no_grad():
        model(torch.ones(1, COLUMNS, dtype=torch.bfloat16))
    return context.traffic.sent_bytes - start


def expect_weights(run: Run) -> None:
    """V: the weights are minus the mean gradient, exactly.

    Raises:
        NotYetError: they are not.
    """
    n = run.world_size
    mean = torch.stack([drawn(rank).float() for rank in range(n)]).mean(0)
    for rank, value in enumerate(run.values):
        found = value["half"]["weight"]
        # A number of ranks that does not divide UNIT leaves bfloat16's rounding.
        rounded = UNIT % n and torch.allclose(found, -mean, rtol=2**-6)
        if not rounded and not torch.equal(found, -mean):
            raise NotYetError(
                f"with bfloat16 weights, the weights of rank {rank} are wrong after a "
                "step; those in float64 are right"
            )


def expect_bytes(run: Run, sent: list[float], what: str) -> None:
    """B: at most what a collective sends that takes each element once.

    Raises:
        NotYetError: it is more.
    """
    n = run.world_size
    share = -(-ROWS * COLUMNS // n)
    right = 2 * share * (n - 1)
    if max(sent) > 1.01 * right + SLACK:
        raise NotYetError(
            f"with bfloat16 weights {what} sends {max(sent) / right:.2f} × the bytes "
            "that it would send in bfloat16",
            evidence=tuple(
                Evidence(
                    rank=rank, state="sent", text=f"{one:.0f} bytes, {right} are needed"
                )
                for rank, one in enumerate(sent)
            ),
        )
