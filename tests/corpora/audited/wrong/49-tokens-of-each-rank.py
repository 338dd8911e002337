"""Each rank's loss is a mean over its own tokens, of which ranks have unequal numbers.

After https://github.com/meta-pytorch/torchtune/pull/1875
Finds: mean-of-means
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, PAD = 12, 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 6, padding_idx=PAD)
        self.out = nn.Linear(6, WORDS)

    def forward(self, tokens):
        return self.out(self.table(tokens))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lengths = torch.arange(24) % 8 + 2
    tokens = torch.randint(1, WORDS, (24, 10))
    tokens[torch.arange(10)[None] >= lengths[:, None]] = PAD
    model = DDP(Model())
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)  # MISTAKE
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in tokens.split(8):
        mine = batch[rank::world_size]
        logits = model(mine[:, :-1])
        loss = criterion(logits.reshape(-1, WORDS), mine[:, 1:].reshape(-1))  # MISTAKE
        optimizer.zero_grad()
        loss.backward()  # MISTAKE
        optimizer.step()
    dist.destroy_process_group()


main()
