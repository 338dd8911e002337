"""One step of a model in bfloat16: what is sent has two bytes per element, not four.

All gradients are whole numbers that bfloat16 can add up and divide without an error,
but for one element: on rank 0 it is infinite.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

ROWS, COLUMNS = 41, 50
SLACK = 256  # bytes for a norm, a loss and the like
SETTINGS = {"lr": 1.0, "weight_decay": 0.0}
UNIT = 144  # its half, third, quarter, and sums of a few, are whole


def drawn(rank: int) -> Tensor:
    """A rank's gradient: multiples of UNIT, at most 3 of them; rank 0 has an inf."""
    places = torch.arange(ROWS * COLUMNS) + rank
    values = (UNIT * (1 + places % 3)).view(ROWS, COLUMNS).to(torch.bfloat16)
    if rank == 0:
        values[-1, -1] = torch.inf
    return values


def step_in_half(
    context: RankContext, unit: ModuleType, *, stage: int
) -> dict[str, Any]:
    """The stage reduces drawn gradients, and takes a step from zero.

    No rank has used the last layer.
    """
    comm = context.comm
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    layer.weight.data.zero_()
    model = nn.Sequential(layer, nn.Linear(1, 1, bias=False, dtype=torch.bfloat16))
    groups = [{"params": [*model.parameters()], **SETTINGS}]
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


class Scaled(nn.Module):
    """A linear layer, and a scale in float32: one element that is the model's own.

    So the model is a layer, too, the first: it computes while its child does. Its scale
    is used after the child, so that backward() has its gradient first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
        self.layer.weight.data.zero_()
        self.scale = nn.Parameter(torch.ones(1))
        self.is_scaled = True

    def forward(self, x: Tensor) -> Tensor:
        """(1, COLUMNS) to (1, ROWS)."""
        scale = self.scale if self.is_scaled else 1
        out: Tensor = self.layer(x) * scale + scale
        return out


def _fully_sharded(comm: Comm, unit: ModuleType, model: nn.Module) -> Any:
    groups = [{"params": [*model.parameters()], **SETTINGS}]
    zero = unit.ShardedOptimizer(comm, model, groups, make_sgd)
    unit.FullySharded(zero, unit.ShardedGradients(zero))
    return zero


def forward_in_half(context: RankContext, unit: ModuleType) -> float:
    """The bytes that a forward at stage 3 sends."""
    model = Scaled()
    _fully_sharded(context.comm, unit, model)
    start = context.traffic.sent_bytes
    with torch.no_grad():
        model(torch.ones(1, COLUMNS, dtype=torch.bfloat16))
    return context.traffic.sent_bytes - start


def step_of_stage3(context: RankContext, unit: ModuleType) -> dict[str, Any]:
    """A step from zero at stage 3; rank 0 leaves the scale out.

    Every row of the weight has the same gradient: the rank's inputs.
    """
    comm, model = context.comm, Scaled()
    zero = _fully_sharded(comm, unit, model)
    model.is_scaled = comm.rank > 0
    start = context.traffic.sent_bytes
    model(drawn(comm.rank)[-1:]).sum().backward()
    zero.reduce_gradients()
    sent = context.traffic.sent_bytes - start
    zero.step()
    full = zero.full_state_dict()
    weight, scale = full["layer.weight"], float(full["scale"])
    return {"weight": weight[-1:].float(), "scale": scale, "sent": sent}


def expect_weights(run: Run, rows: int = ROWS) -> None:
    """The weights are minus the mean gradient, exactly; its last `rows`.

    Raises:
        NotYetError: they are not.
    """
    n = run.world_size
    mean = torch.stack([drawn(rank)[-rows:].float() for rank in range(n)]).mean(0)
    finite = mean.isfinite()
    for rank, value in enumerate(run.values):
        found = value["half"]["weight"]
        # A number of ranks that does not divide UNIT leaves bfloat16's rounding.
        rounded = UNIT % n and torch.allclose(found, -mean, rtol=2**-6)
        if rounded or torch.equal(found, -mean):
            continue
        if torch.allclose(found[finite], -mean[finite], rtol=2**-6):
            raise NotYetError(
                "when a gradient has an inf on rank 0, the weight after a step is "
                f"{float(found[-1, -1]):.3g} on rank {rank}, expected -inf"
            )
        raise NotYetError(
            f"after a step with bfloat16 weights, rank {rank}'s weights are wrong, "
            "expected them right as with float64"
        )


def expect_scale(run: Run) -> None:
    """The scale has had a gradient of ROWS on every rank but the first.

    Raises:
        NotYetError: it has not.
    """
    right = 1 - ROWS * (run.world_size - 1) / run.world_size
    for rank, value in enumerate(run.values):
        found = value["half"]["scale"]
        if not abs(found - right) < 1e-3:
            raise NotYetError(
                "after a step, a parameter that the model uses after its layer is "
                f"{found:.4g} on rank {rank}, expected {right:.4g}",
                rule="the gradients of other buckets may be there already: leave them",
            )


def expect_bytes(run: Run, sent: list[float], what: str, times: int = 1) -> None:
    """At most what a collective sends that takes each element once; or `times`.

    Raises:
        NotYetError: it is more.
    """
    n = run.world_size
    share = -(-ROWS * COLUMNS // n)
    right = 2 * share * (n - 1) * times
    if max(sent) > 1.01 * right + SLACK:
        raise NotYetError(
            f"with bfloat16 weights, {what} sent {max(sent) / right:.3g} times the "
            f"bytes that are needed, expected {right} bytes",
            evidence=[
                (rank, "sent", f"{one:.0f} bytes, {right} are needed")
                for rank, one in enumerate(sent)
            ],
        )
