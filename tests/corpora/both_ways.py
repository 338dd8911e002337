"""Ranks that can talk both ways, through a Comm and through torch's default group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.comm import TorchComm, leave_default_group
from distlab.models.transformer import TransformerConfig
from distlab.runner import RankContext

CONFIG = TransformerConfig(
    vocab_size=512, context=32, dim=256, num_heads=4, num_layers=6
)
SMALL = TransformerConfig(vocab_size=64, context=8, dim=32, num_heads=4, num_layers=2)


def meet(context: RankContext, folder: str) -> TorchComm:
    """Torch's default group of gloo, and a Comm on it; one thread for a rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=context.rank,
        world_size=context.world_size,
    )
    torch.set_num_threads(1)
    return TorchComm.from_default()


def leave() -> None:
    """End together: who leaves early closes the others' connections."""
    dist.barrier()
    leave_default_group()
