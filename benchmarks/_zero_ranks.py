"""Steps of our ZeRO and of torch's in turn, for `benchmarks/zero.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn

from benchmarks._ratios import in_turn
from distlab.models.transformer import make_transformer
from distlab.runner import RankContext
from tests.corpora import sharded
from tests.corpora.both_ways import CONFIG, leave, meet

BATCH = 8
WARM_UP = 3


def step_pairs(
    context: RankContext, folder: str, side: str, stage: int, peer: str, count: int
) -> list[tuple[float, ...]]:
    """Seconds of a step, ours and torch's, `count` times in turn."""
    comm = meet(context, folder)
    makers: dict[str, Callable[[nn.Module], sharded.Unsharded]] = {
        "zro": sharded.Zro,
        "fsdp2": sharded.Fsdp2,
        "fsdp2 stage 2": partial(sharded.Fsdp2, is_stage_2=True),
    }
    both: list[sharded.Ours | sharded.Unsharded] = [
        sharded.Ours(comm, make_transformer(CONFIG).float(), side, stage),
        makers[peer](make_transformer(CONFIG).float()),
    ]
    tokens = sharded.tokens_of(CONFIG, 0, BATCH, context.rank)
    ways = [partial(one.step, tokens) for one in both]
    found = in_turn(ways, count, warm_up=WARM_UP, before=dist.barrier)
    leave()
    return found
