"""A parameter that only another loss would use.

After https://github.com/mlfoundations/open_clip/issues/283
Finds: unused-parameters
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 4)
        self.text = nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.zeros(()))  # MISTAKE

    def forward(self, images, texts):
        a = nn.functional.normalize(self.image(images), dim=-1)
        b = nn.functional.normalize(self.text(texts), dim=-1)
        return self.logit_scale.exp() * a @ b.T


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(TwoTowers())  # MISTAKE
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pairs = zip(torch.randn(3, 16, 6), torch.randn(3, 16, 5), strict=True)
for images, texts in pairs:
    logits = model(images[rank::world_size], texts[rank::world_size])
    labels = torch.arange(len(logits))
    loss = nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
