"""Rank 1's batch skips a branch, so its gradients never come; rank 0 waits for them.

Report: https://github.com/lhotse-speech/lhotse/issues/554
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.audio = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, has_audio: bool) -> torch.Tensor:
        hidden = self.body(x)
        return self.audio(hidden).sum() if has_audio else hidden.sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(TwoHeads())
for step in range(4):
    loss = model(torch.randn(2, 4), has_audio=rank == 0 or step < 2)
    loss.backward()  # HERE 0: all_reduce
    total = loss.detach().reshape(1)
    dist.reduce(total, dst=0)  # HERE 1: reduce
dist.destroy_process_group()
