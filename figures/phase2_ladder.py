"""What a rank keeps in memory; `python -m figures.phase2_ladder` writes the picture.

It is measured on the course's own transformer, with GPT-2 medium's sizes, on torch's
`meta` device: tensors there have shapes and no contents, so that nothing is computed
and 30 GB need no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.models.transformer import (
    Block,
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.trace.palette import (
    ACTIVATIONS,
    GRADIENTS,
    GRID,
    INK,
    MUTED,
    OPTIMIZER_STATE,
    SURFACE,
    WEIGHTS,
    text_on,
)
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER

CONFIG = TransformerConfig(
    vocab_size=50_304, context=1024, dim=1024, num_heads=16, num_layers=24
)
LEFT = 208.0  # where the bars begin
SEQUENCES = 8  # the batch of one step
MASTER = "fp32 master"  # a frame in the color of the weights
PARTS = (
    ("weights", WEIGHTS),
    ("gradients", GRADIENTS),
    (MASTER, SURFACE),
    ("optimizer state", OPTIMIZER_STATE),
    ("activations", ACTIVATIONS),
)
Step = Callable[[nn.Module, Tensor], Tensor]


class Rung(NamedTuple):
    """A bar of the ladder: bytes on the rank that has most."""

    name: str
    below: str
    weights: float
    gradients: float
    master: float
    optimizer: float
    activations: float


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The transformer without contents."""
    with torch.device("meta"):
        return make_transformer(CONFIG).to(dtype)


def size(module: nn.Module) -> int:
    """How many weights a module has."""
    return sum(parameter.numel() for parameter in module.parameters())


def tokens(sequences: int) -> Tensor:
    """Integers (B, T) without contents."""
    return torch.empty(sequences, CONFIG.context, dtype=torch.long, device="meta")


def kept(module: nn.Module, compute: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for backward, each memory counted once, no weights."""
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    memory: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            memory[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    del result  # it has held the graph, and with it every memory that was counted
    return sum(memory.values())


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer without checkpointing."""
    result: Tensor = layer(x)
    return result


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    """A block keeps its input only; the other layers are not checkpointed."""
    if not isinstance(layer, Block):
        return plainly(layer, x)
    result: Tensor = unit("activation_checkpointing").checkpoint(layer, x)
    return result


@cache
def unit(name: str) -> ModuleType:
    """The reference's functions of a unit."""
    return load(name)


def activations(
    layers: nn.Sequential, sequences: int, step: Step = plainly, live: int = 1
) -> int:
    """Bytes kept at the peak of a stage that has `live` microbatches in flight."""
    dtype = next(layers.parameters()).dtype
    shape = (sequences, CONFIG.context, CONFIG.dim)

    def compute() -> Tensor:
        x = tokens(sequences)
        if layers[0].__class__.__name__ != "Embedding":
            x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        for layer in layers:
            x = step(layer, x)
        if layers[-1].__class__.__name__ == "Head":
            x = next_token_loss(x, tokens(sequences))
        return x

    all_kept = kept(layers, compute)
    if step is plainly:
        return live * all_kept
    block = next(layer for layer in layers if isinstance(layer, Block))
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    inside = kept(block, lambda: plainly(block, x))
    inputs = sum(isinstance(layer, Block) for layer in layers) * x.nbytes
    return (live - 1) * all_kept + max(all_kept, inputs + inside)


def stages(shares: int) -> list[nn.Sequential]:
    """Two stages of about equal cost; each block on `shares` tensor ranks."""
    whole = model(torch.bfloat16)
    cuts = unit("model_parallel").partition([size(layer) for layer in whole], 2)
    if shares > 1:
        comm = SimpleNamespace(rank=0, world_size=shares, all_reduce=lambda _: None)
        for layer in whole:
            if isinstance(layer, Block):
                unit("tensor_parallel").parallel_mlp(comm, layer.mlp)
                unit("tensor_parallel").parallel_attention(comm, layer.attention)
    return [nn.Sequential(*(whole[number] for number in cut)) for cut in cuts]


def rung(name: str, below: str, weights: int, kept_bytes: int, *, wide: bool) -> Rung:
    """Adam in float32, or in bfloat16 with float32 master weights and moments."""
    return Rung(
        name,
        below,
        weights * (4 if wide else 2),
        weights * (4 if wide else 2),
        weights * (0 if wide else 4),
        weights * 8,
        kept_bytes,
    )


@cache
def ladder() -> list[Rung]:
    """One more technique in each row."""
    wide, narrow = model(), model(torch.bfloat16)
    count = size(wide)
    rows = [
        rung("full batch at once", "float32, Adam", count,
             activations(wide, SEQUENCES), wide=True),
        rung("8 microbatches", "task 2.1", count, activations(wide, 1), wide=True),
        rung("each block checkpointed", "task 2.5", count,
             activations(wide, 1, checkpointed), wide=True),
        rung("bf16, fp32 master", "task 2.6", count,
             activations(narrow, 1, checkpointed), wide=False),
    ]  # fmt: skip
    for shares, name, below in (
        (1, "2 stages, 1F1B", "task 2.14, on 2 ranks"),
        (2, "2 stages × 2 shards", "task 2.18, on 4 ranks"),
    ):
        rungs = [
            rung(name, below, size(stage),
                 activations(stage, 1, checkpointed, live=2 - rank), wide=False)
            for rank, stage in enumerate(stages(shares))
        ]  # fmt: skip
        rows.append(max(rungs, key=lambda row: sum(row[2:])))
    return rows


def memory() -> str:
    """A bar per row: weights, gradients, optimizer state, activations."""
    rows = ladder()
    totals = [sum(row[2:]) / 1e9 for row in rows]
    c = Canvas(
        "memory",
        760,
        456,
        title="Memory of one training step: each row adds one technique",
        desc=(
            "Six bars for the rank that needs most, each divided into weights, "
            "gradients, float32 master weights if there are any, optimizer state and "
            "activations. "
            + "; ".join(
                f"{row.name}: {total:.1f} GB"
                for row, total in zip(rows, totals, strict=True)
            )
            + ". Microbatches and checkpointing reduce the activations to a small "
            "rest; only sharding the model reduces the others. In the rows with "
            "bfloat16, the master weights take as much as weights and gradients "
            "together."
        ),
    )
    scale = 440 / totals[0]
    for x, (name, color) in zip(
        (150.0, 248.0, 352.0, 472.0, 624.0), PARTS, strict=True
    ):
        _part(c, x, 10, 16, 16, name, color)
        c.text(x + 24, 23, name, size=12.5, anchor="start")
    for place, row in enumerate(rows):
        y = 64 + 56 * place
        _bar(c, LEFT, y, row, scale)
        c.text(LEFT - 12, y + 16, row.name, size=12.5, bold=True, anchor="end")
        c.text(LEFT - 12, y + 32, row.below, size=11, color=MUTED, anchor="end")
        x = LEFT + scale * totals[place] + 8
        c.text(x, y + 23, f"{totals[place]:.1f} GB", bold=True, anchor="start")
    c.line(LEFT, 54, LEFT, 382)
    _axis(c, LEFT, 54, scale, (0, 10, 20, 30, 40), up=True)
    _zoom(c, rows[2:])
    millions = size(model()) / 1e6
    c.text(
        24,
        444,
        f"{millions:.0f} million weights, {SEQUENCES} sequences of {CONFIG.context:,} "
        "tokens per step; the rank that needs most",
        size=11.5,
        color=MUTED,
        anchor="start",
    )
    return c.svg()


def _zoom(c: Canvas, rows: list[Rung]) -> None:
    """The small bars again, on the same lines, with the GB of each part."""
    left, scale = 418.0, 42.0
    c.rect(left - 24, 148, 754 - left + 14, 278, fill=SURFACE, stroke=GRID, round_=6)
    c.text(left, 166, "zoom, in GB", size=12, bold=True, anchor="start")
    for place, row in enumerate(rows):
        y = 64 + 56 * (place + 2)
        end = _bar(c, left, y, row, scale, named=True)
        c.text(end + 5, y + 23, f"{row.activations / 1e9:.2f}", size=11, anchor="start")
    c.line(left, 172, left, 398)
    _axis(c, left, 398, scale, (0, 2, 4, 6))


def _axis(
    c: Canvas,
    left: float,
    y: float,
    scale: float,
    ticks: tuple[int, ...],
    *,
    up: bool = False,
) -> None:
    """GB from zero on."""
    c.line(left, y, left + scale * ticks[-1], y)
    for tick in ticks:
        x = left + scale * tick
        c.line(x, y, x, y - 4 if up else y + 4)
        words = f"{tick} GB" if tick else "0"
        c.text(x, y - 8 if up else y + 17, words, size=11, color=MUTED)


def _bar(
    c: Canvas, x: float, y: float, row: Rung, scale: float, *, named: bool = False
) -> float:
    """A row of the ladder, `scale` pixels for a GB; where it ends."""
    for value, (name, color) in zip(row[2:], PARTS, strict=True):
        wide = scale * round(value / 1e9, 2)
        _part(c, x, y, wide, 36, name, color)
        if name != "activations" and named and wide > 24:
            words, ink = f"{value / 1e9:.1f}", text_on(color)
            c.text(x + wide / 2, y + 23, words, size=11, color=ink)
        x += wide
    return x


def _part(
    c: Canvas, x: float, y: float, wide: float, tall: float, name: str, color: str
) -> None:
    """Fill the box of one part: hatched for activations, framed for master weights."""
    if name == MASTER and wide > 0:
        c.rect(x, y, wide, tall, fill=color, thick=0.8)
        thick = min(2.5, wide / 5)
        box = x + thick / 2, y + thick / 2, wide - thick, tall - thick
        c.rect(*box, stroke=WEIGHTS, thick=thick)
    elif name == "activations" and wide > 1:
        c.hatch(x, y, wide, tall, color=INK, fill=color)
    elif wide > 0:
        c.rect(x, y, wide, tall, fill=color, thick=0.8)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"memory.svg": memory()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
