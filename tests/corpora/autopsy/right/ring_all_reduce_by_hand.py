"""A ring all-reduce with chunks that aren't all of one size.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
chunks = list(torch.arange(10.0).tensor_split(size))
right, left = (rank + 1) % size, (rank - 1) % size
for phase in ("reduce", "gather"):
    for step in range(size - 1):
        shift = 1 if phase == "gather" else 0
        out = (rank - step + shift) % size
        into = (out - 1) % size
        work = dist.isend(chunks[out].clone(), dst=right)
        received = torch.empty_like(chunks[into])
        dist.recv(received, src=left)
        work.wait()
        chunks[into] = received + chunks[into] if phase == "reduce" else received
assert torch.equal(torch.cat(chunks), torch.arange(10.0) * size)
dist.destroy_process_group()
