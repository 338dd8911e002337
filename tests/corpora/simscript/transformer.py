"""A large transformer with FSDP2, as a script: `transformer.py 7b`, or 70b.

On fake tensors alone: its parameters take 27 GB and 276 GB in float32.
"""

import json
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class Size(NamedTuple):
    """The shape of a model; `kv_heads` share keys and values among the heads."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    words: int = 32_000
    tokens: int = 2_048


SIZES = {
    "tiny": Size(64, 2, 4, 2, 128, 256, 32),
    "7b": Size(4096, 32, 32, 32, 11_008),
    "70b": Size(8192, 80, 64, 8, 28_672),
}


class Block(nn.Module):
    """Attention, and a gated layer behind it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.head = width // size.heads
        narrow = size.kv_heads * self.head
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, narrow, bias=False)
        self.value = nn.Linear(width, narrow, bias=False)
        self.join = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width), the same shape."""
        normed = self.norms[0](x)
        parts = [
            layer(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        repeats = parts[0].shape[1] // parts[1].shape[1]
        query, key, value = (
            part if i == 0 else part.repeat_interleave(repeats, dim=1)
            for i, part in enumerate(parts)
        )
        seen = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        out: Tensor = x + self.down(
            functional.silu(self.gate(normed)) * self.up(normed)
        )
        return out


class Transformer(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.scores = nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Of (batch, tokens), to (batch, tokens, words)."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.scores(self.norm(x))
        return scores


def main() -> None:
    """Train two steps, and print the seconds of each on rank 0."""
    dist.init_process_group("gloo")
    size = SIZES[sys.argv[1]]
    with torch.device("meta"):
        model = Transformer(size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(size.words, (1, size.tokens + 1))
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        optimizer.zero_grad()
        scores = model(words[:, :-1])
        functional.cross_entropy(
            scores.flatten(0, 1), words[:, 1:].flatten()
        ).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds))


if __name__ == "__main__":
    main()
