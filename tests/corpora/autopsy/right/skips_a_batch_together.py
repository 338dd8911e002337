"""If any rank's loss is NaN, all of them skip the batch.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(8):
    loss = torch.tensor(float("nan") if (rank, step) == (1, 3) else 1.0)
    is_bad = loss.isnan().to(torch.float32).reshape(1)
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad.item():
        continue
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
