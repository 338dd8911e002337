"""A small language model on DDP with gradient accumulation and no_sync.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
generator = torch.Generator().manual_seed(rank)
accumulate = 3
for step in range(5):
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        tokens = torch.randint(0, 64, (4, 17), generator=generator)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        (loss / accumulate).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(step, loss.item())
dist.destroy_process_group()
