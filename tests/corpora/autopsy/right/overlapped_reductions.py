"""All gradients are reduced asynchronously, and the works are awaited in reverse.

Ranks: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):
    grads = [torch.ones(1 << k) for k in range(8, 14)]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    busy = torch.randn(200, 200)
    for _ in range(20):
        busy = busy @ busy / 200
    for work in reversed(works) if dist.get_rank() else works:
        work.wait()
dist.destroy_process_group()
