"""Two messages are received by tag, in the opposite order of the sends.

Ranks: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    works = [dist.isend(torch.full((4,), float(tag)), 1, tag=tag) for tag in (1, 2)]
    for work in works:
        work.wait()
else:
    for tag in (2, 1):
        box = torch.empty(4)
        dist.recv(box, 0, tag=tag)
        assert box[0].item() == tag
dist.destroy_process_group()
