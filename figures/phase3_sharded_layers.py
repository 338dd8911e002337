"""Stage 3 with and without prefetch; `python -m figures.phase3_sharded_layers`.

The times are those of the reference's own run on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, run
from distlab.sim.net.links import PS
from distlab.trace.palette import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INK,
    LINK_IDLE,
    MUTED,
    WEIGHTS,
    text_on,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
RANKS, LAYERS, WIDTH = 4, 4, 4
COMPUTE_S, GATHER_S = 1.0, 0.5  # of a layer in one direction; of its weights
SHARD_BYTES = 4 * WIDTH * WIDTH // RANKS
NET = AlphaBeta(alpha_s=0.0, bytes_per_s=(RANKS - 1) * SHARD_BYTES / GATHER_S)
LEFT, SCALE = 120, 42.0


COLORS = {
    "gather": WEIGHTS,
    "scatter": GRADIENTS,
    "forward": FORWARD,
    "backward": BACKWARD,
}


class Span(NamedTuple):
    """What a rank or its wire did, from when to when."""

    what: str
    layer: int
    start_s: float
    end_s: float


class _Paused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, take_time: Callable[[str], None], x: Tensor) -> Tensor:
        ctx.take_time = take_time
        take_time("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.take_time("backward")
        return None, gradient


class _Layer(nn.Module):
    def __init__(self, take_time: Callable[[str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self._take_time = take_time

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Paused.apply(  # type: ignore[no-untyped-call]
            self._take_time, x @ self.weight
        )
        return out


def spans(is_prefetching: bool) -> list[Span]:
    """What rank 0 and its wire do in a forward and a backward."""
    done = run(
        partial(_step, is_prefetching=is_prefetching),
        RANKS,
        net=NET,
        carrier="threads",
    )
    done.require_finished()
    found: list[Span] = done.values[0]
    order = [span.layer for span in found if span.what == "fetch"]
    arriving = [m for m in done.trace if m.dst == 0]
    found = [span for span in found if span.what != "fetch"]
    for place, layer in enumerate(order):  # a shard from each of the others
        shards = arriving[place * (RANKS - 1) : (place + 1) * (RANKS - 1)]
        first, last = shards[0].start_ps / PS, shards[-1].end_ps / PS
        found.append(Span("gather", layer, first, last))
    return found


def _step(context: RankContext, is_prefetching: bool) -> list[Span]:
    comm, told = context.comm, list[Span]()

    def timed(what: str, layer: int, act: Callable[[], Any]) -> Any:
        start = comm.time()
        result = act()
        told.append(Span(what, layer, start, comm.time()))
        return result

    def take_time(layer: int, direction: str) -> None:
        timed(direction, layer, partial(context.clock.sleep, COMPUTE_S))

    def watched(what: str, act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda bucket: timed(
            what, zero.buckets.index(bucket), partial(act, bucket)
        )

    unit = load("sharded_optimizer", "reference")
    model = nn.Sequential(*(_Layer(partial(take_time, n)) for n in range(LAYERS)))
    groups = [{"params": list(model.parameters())}]
    factory = partial(torch.optim.SGD, lr=0.1)
    zero = unit.at_stage(3, unit.ShardedOptimizer(comm, model, groups, factory))
    weights = zero.weights
    weights.is_prefetching = is_prefetching
    weights.unshard_bucket = watched("gather", weights.unshard_bucket)
    weights.prefetch = watched("fetch", weights.prefetch)
    weights.reduce_bucket = watched("scatter", weights.reduce_bucket)
    model(torch.ones(1, WIDTH)).sum().backward()
    return told


def zero_ahead() -> str:
    """Two timelines, computation and communication: gathered when needed, or before."""
    plain, ahead = spans(is_prefetching=False), spans(is_prefetching=True)
    ends = [max(span.end_s for span in found) for found in (plain, ahead)]
    c = Canvas(
        "zero_ahead",
        760,
        300,
        title="Stage 3: weights gathered when they are needed, or prefetched",
        desc=(
            f"Two timelines of one rank with {LAYERS} layers, each with a row for "
            "computation and a row for communication. In the first, the rank gathers "
            f"a layer's weights, then computes: {ends[0]:g} s. In the second, it "
            "gathers the next layer's weights while a layer computes, except for the "
            f"first layer: {ends[1]:g} s. The reduce-scatter is exposed in both."
        ),
    )
    _lanes(c, 30, "without prefetch", plain)
    _lanes(c, 150, "with prefetch", ahead)
    for x, color, words in (
        (LEFT, WEIGHTS, "all-gather of weights"),
        (LEFT + 190, GRADIENTS, "reduce-scatter of gradients"),
        (LEFT + 420, FORWARD, "forward"),
        (LEFT + 420 + 84, BACKWARD, "backward"),
    ):
        c.rect(x, 268, 12, 12, fill=color, stroke=INK)
        c.text(x + 18, 279, words, size=12, anchor="start")
    return c.svg()


def _lanes(c: Canvas, top: float, title: str, found: list[Span]) -> None:
    c.text(24, top + 8, title, size=13, bold=True, anchor="start")
    end = max(span.end_s for span in found)
    for row, words in enumerate(("computation", "network")):
        y = top + 20 + 36 * row
        c.text(24, y + 20, words, size=12, anchor="start")
        c.rect(LEFT, y, SCALE * end, 30, fill=LINK_IDLE, stroke=LINK_IDLE)
    for span in found:
        is_wire = span.what in ("gather", "scatter")
        color = COLORS[span.what]
        x, y = LEFT + SCALE * span.start_s, top + 20 + 36 * is_wire
        width = SCALE * (span.end_s - span.start_s)
        c.rect(x, y, width, 30, fill=color, stroke=INK)
        c.text(x + width / 2, y + 20, str(span.layer), size=11.5, color=text_on(color))
    back = max(span.end_s for span in found if span.what == "forward")
    x = LEFT + SCALE * back
    c.line(x, top + 14, x, top + 90, color=MUTED, dash="4 3")
    c.text(x + 4, top + 8, "backward →", size=11.5, color=MUTED, anchor="start")
    c.text(LEFT + SCALE * end + 6, top + 58, f"{end:g} s", size=13, anchor="start")


def figures() -> dict[str, str]:
    """The picture under its file name."""
    return {"zero_ahead.svg": zero_ahead()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
