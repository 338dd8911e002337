"""The cluster of `benchmarks/simscript.py`, and what a step takes on it by formula."""

from __future__ import annotations

from distlab.sim import AlphaBeta
from tests.corpora.simscript.transformer import Size

NET = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
FLOPS_PER_S = 4e14
PER_NODE = 8
FLOAT = 4  # bytes


Parameters = list[tuple[int, int]]  # rows and columns; a vector has one column


def layers_of(size: Size) -> tuple[Parameters, Parameters]:
    """The elements of a block's parameters, and of what is around the blocks.

    Each as rows and columns; a vector has columns of one element.
    """
    narrow = size.kv_heads * size.width // size.heads
    block = [
        *[(size.width, 1)] * 2,
        *[(size.width, size.width), (narrow, size.width), (narrow, size.width)],
        *[(size.width, size.width), (size.hidden, size.width)],
        *[(size.hidden, size.width), (size.width, size.hidden)],
    ]
    around = [(size.words, size.width), (size.width, 1), (size.words, size.width)]
    return block, around


def step_s(size: Size, n: int) -> dict[str, float]:
    """Seconds of an FSDP2 step without overlap: compute, and communication.

    A block is gathered for forward() and again for backward(), what is around the
    blocks once; the gradients of each are reduced and scattered. Backward takes two
    products for one, and attention computes its scores a second time.
    """
    block, around = layers_of(size)
    hops = n - 1

    def ring_s(parameters: Parameters) -> float:
        shard = sum(-(-rows // n) * columns for rows, columns in parameters)
        return hops * NET.message_s(FLOAT * shard)

    matrices = sum(r * c for r, c in block if c > 1) * size.layers
    matrices += size.words * size.width  # to look a word up is no product
    pairs = size.tokens**2 * size.width * size.layers
    flops = 6 * matrices * size.tokens + (4 + 10) * pairs
    return {
        "compute_s": flops / FLOPS_PER_S,
        "communication_s": 3 * size.layers * ring_s(block) + 2 * ring_s(around),
    }
