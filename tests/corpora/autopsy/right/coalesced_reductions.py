"""Several tensors are reduced in one coalesced call.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(4):
    grads = [torch.ones(n) for n in (3, 17, 256)]
    dist.all_reduce_coalesced(grads)
    assert all(grad[0].item() == 3 for grad in grads)
dist.destroy_process_group()
