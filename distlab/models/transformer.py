"""A small decoder-only transformer, which knows nothing of how it is sharded.

It is an `nn.Sequential` of layers, so that it can be cut anywhere. How many heads an
attention has is read off what its `qkv` gives it, so that it works on a share of them.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), for
the order of norm, attention and MLP; the names are nanoGPT's where it has them.
Symbols: B sequences, T tokens in each, C channels, H heads of D = C / H, V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distlab.seeds import small_seed


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a transformer; every linear layer but the last one has a bias."""

    vocab_size: int = 64  # V
    context: int = 16  # the longest T
    dim: int = 32  # C
    num_heads: int = 4  # H
    num_layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"{self.dim} channels cannot be shared out to {self.num_heads} heads"
            )


class Embedding(nn.Module):
    """Tokens to channels: what the token is, plus where it stands."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.context, config.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) whole numbers to (B, T, C)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(places)
        return embedded


class Attention(nn.Module):
    """Each token looks at itself and at those before it, once per head.

    The rows of `qkv.weight` are all heads' queries, then all keys, then all values;
    in each of the three, head 0 has the first D rows, head 1 the next, and so on.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.dim // config.num_heads  # D
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        three = self.qkv(x).unflatten(2, (3, -1, self.head_dim))  # (B, T, 3, H, D)
        q, k, v = three.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5  # (B, H, T, T)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(3)
        heads = (weights @ v).transpose(1, 2)  # (B, T, H, D)
        projected: Tensor = self.proj(heads.flatten(2))
        return projected


class MLP(nn.Module):
    """Each token by itself: four times as many channels, a bend, and back."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        mixed: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return mixed


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        mixed: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return mixed


class Head(nn.Module):
    """Channels to a score (a logit) for each token that could come next."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.logits = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, V)."""
        scores: Tensor = self.logits(self.norm(x))
        return scores


def make_transformer(config: TransformerConfig, seed: int = 0) -> nn.Sequential:
    """Embedding, blocks and head, in float64; tokens (B, T) to logits (B, T, V).

    The same seed gives the same weights; torch's own generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small_seed(seed))
        blocks = [Block(config) for _ in range(config.num_layers)]
        layers = [Embedding(config), *blocks, Head(config)]
        return nn.Sequential(*layers).double()


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of each token's logits against the token after it.

    `logits` (B, T, V) and `tokens` (B, T); the last token has none after it.
    """
    predicted, wanted = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return nn.functional.cross_entropy(predicted, wanted)
