"""Every collective for Python objects, after one another.

Ranks: 3
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
gathered: list = [None] * size
dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 100})
collected: list | None = [None] * size if rank == 1 else None
dist.gather_object(("from", rank), collected, dst=1)
settings: list = [{"lr": 0.1}, "name"] if rank == 2 else [None, None]
dist.broadcast_object_list(settings, src=2)
mine: list = [None]
dist.scatter_object_list(mine, [[r] for r in range(size)] if rank == 0 else None, src=0)
print(gathered, collected, settings, mine)
dist.destroy_process_group()
