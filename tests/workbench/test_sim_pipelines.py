"""Pipelines: the time that their formula says, and the gradients of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.runner import Cluster, RankContext, Run
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.plans import closed_forms as forms
from distlab.sim.plans import pipelines as pipes

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
FREE = AlphaBeta(alpha_s=0.0, bytes_per_s=math.inf)
WORLDS = (2, 3, 4, 8, 16, 64)


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


def simulated(program: Any, n: int, *args: Any, net: AlphaBeta = NET) -> SimRun:
    done = run(program, n, *args, net=net, journal=False)
    done.require_finished()
    return done


PIPELINES = {"gpipe": pipes.gpipe, "1f1b": pipes.one_f_one_b}


def timed(
    ctx: RankContext, name: str, m: int, forward_s: float, backward_s: float
) -> None:
    like = torch.zeros(1000, dtype=torch.float64)
    stage = pipes.TimedStage(
        forward_s=forward_s, backward_s=backward_s, like=like, sleep=ctx.clock.sleep
    )
    PIPELINES[name](ctx.comm, stage, [like] * m)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    ("stages", "m"),
    [(1, 5), *((n, 5) for n in WORLDS), (3, 1), (4, 2), (8, 7), (4, 16)],
)
def test_a_pipeline_takes_what_its_formula_says(name: str, stages: int, m: int) -> None:
    seconds = {"gpipe": forms.gpipe_s, "1f1b": forms.one_f_one_b_s}[name]
    for forward_s, backward_s in ((1e-3, 2e-3), (2e-3, 2e-3), (3e-3, 1e-3)):
        done = simulated(timed, stages, name, m, forward_s, backward_s, net=FREE)
        assert done.time_s == close_to(seconds(stages, m, forward_s, backward_s))
        assert len(done.trace) == 2 * m * (stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_gpipe_hides_messages_behind_computing(stages: int) -> None:
    hop_s = NET.message_s(8000)
    done = simulated(timed, stages, "gpipe", 6, 2 * hop_s, hop_s)
    assert done.time_s == close_to(forms.gpipe_s(stages, 6, 2 * hop_s, hop_s, hop_s))


def one_by_one(
    ctx: RankContext, name: str, m: int, forward_s: float, backward_s: float
) -> None:
    """The slip: a microbatch goes there and back before the next one starts."""
    for _ in range(m):
        timed(ctx, name, 1, forward_s, backward_s)


def test_the_equality_tells_a_pipeline_that_is_none_apart() -> None:
    done = simulated(one_by_one, 4, "gpipe", 4, 1e-3, 2e-3, net=FREE)
    assert done.time_s == close_to(4 * forms.gpipe_s(4, 1, 1e-3, 2e-3))
    assert done.time_s > 2 * forms.gpipe_s(4, 4, 1e-3, 2e-3)


class Scale:
    """A stage that computes: y = w x, loss = sum(y); keeps its inputs."""

    def __init__(self, weight: float) -> None:
        self.weight, self.grad = weight, 0.0
        self._kept: dict[int, Tensor] = {}
        self.most_kept = 0

    def forward(self, number: int, x: Tensor) -> Tensor:
        self._kept[number] = x
        self.most_kept = max(self.most_kept, len(self._kept))
        return self.weight * x

    def backward(self, number: int, grad: Tensor | None) -> Tensor:
        x = self._kept.pop(number)
        grad = torch.ones_like(x) if grad is None else grad
        self.grad += float((grad * x).sum())
        return self.weight * grad


def trained(ctx: RankContext, name: str, m: int) -> tuple[float, int]:
    inputs = [torch.full((3,), float(number + 1)).double() for number in range(m)]
    if ctx.rank:  # only their shape counts here
        inputs = [torch.empty_like(x) for x in inputs]
    stage = Scale(ctx.rank + 2.0)
    PIPELINES[name](ctx.comm, stage, inputs)
    return stage.grad, stage.most_kept


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("transport", ["sim", "gloo"])
def test_a_pipeline_trains_as_one_process_does(
    cluster: Cluster, name: str, transport: str
) -> None:
    p, m = 3, 5
    if transport == "sim":
        done: Run = simulated(trained, p, name, m)
    else:
        done = cluster.run(trained, p, name, m).require_finished()
    product = math.prod(rank + 2.0 for rank in range(p))
    total = 3 * sum(range(1, m + 1))
    assert [grad for grad, _ in done.values] == [
        pytest.approx(total * product / (rank + 2.0)) for rank in range(p)
    ]
    kept = [kept for _, kept in done.values]
    assert kept == ([m] * p if name == "gpipe" else [p - rank for rank in range(p)])


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        (lambda: forms.gpipe_s(0, 4, 1.0, 1.0), "^0 ranks"),
        (lambda: forms.one_f_one_b_s(4, 0, 1.0, 1.0), "^0 microbatches"),
        (lambda: forms.gpipe_s(4, 4, 1.0, 2.0, 1.5), "messages"),
    ],
)
def test_formulas_refuse_what_they_do_not_hold_for(
    formula: Callable[[], float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        formula()
