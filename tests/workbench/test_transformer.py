"""The small transformer: causal, the same for a seed, cut and shared out as it says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distlab.models.transformer import (
    Attention,
    TransformerConfig,
    make_transformer,
    next_token_loss,
)

CONFIG = TransformerConfig()


def tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (3, CONFIG.context)
    return torch.randint(0, CONFIG.vocab_size, size, generator=generator)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    one, same = make_transformer(CONFIG, 1), make_transformer(CONFIG, 1)
    other = make_transformer(CONFIG, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one(tokens()), same(tokens()))
    assert not torch.allclose(one(tokens()), other(tokens()))


def test_no_token_sees_a_later_one() -> None:
    model, first = make_transformer(CONFIG), tokens()
    changed = first.clone()
    changed[:, 9] = (changed[:, 9] + 1) % CONFIG.vocab_size
    difference = (model(first) - model(changed)).abs().amax((0, 2))
    assert difference[:9].max() == 0
    assert (difference[9:] > 0).all()


def test_attention_is_that_of_torch() -> None:
    attention = Attention(CONFIG).double()
    theirs = nn.MultiheadAttention(CONFIG.dim, CONFIG.num_heads, batch_first=True)
    theirs = theirs.double()
    theirs.in_proj_weight = nn.Parameter(attention.qkv.weight.detach().clone())
    theirs.in_proj_bias = nn.Parameter(attention.qkv.bias.detach().clone())
    theirs.out_proj.load_state_dict(attention.proj.state_dict())
    x = torch.randn(2, 5, CONFIG.dim, dtype=torch.float64)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=later)
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-12)


def test_the_heads_can_be_shared_out_without_the_model_knowing() -> None:
    whole = Attention(CONFIG).double()
    x = torch.randn(2, 5, CONFIG.dim, dtype=torch.float64)
    parts = []
    for chosen in (slice(0, 1), slice(1, 4)):
        part = copy.deepcopy(whole)
        rows = torch.arange(3 * CONFIG.dim).unflatten(0, (3, CONFIG.num_heads, -1))
        mine = rows[:, chosen].flatten()
        part.qkv.weight = nn.Parameter(whole.qkv.weight[mine])
        part.qkv.bias = nn.Parameter(whole.qkv.bias[mine])
        columns = rows[0, chosen].flatten()
        part.proj.weight = nn.Parameter(whole.proj.weight[:, columns])
        parts.append(part(x) - whole.proj.bias)
    torch.testing.assert_close(sum(parts) + whole.proj.bias, whole(x))


def test_it_is_cut_into_layers_and_trains() -> None:
    model = make_transformer(CONFIG)
    assert torch.equal(model[2:](model[:2](tokens())), model(tokens()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens()), tokens())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(64.0).log(), abs=0.5)
    assert losses[-1] < losses[0] - 0.5
    assert all(p.grad is not None for p in model.parameters())


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b32\b.*\b5 heads\b"):
        TransformerConfig(num_heads=5)
