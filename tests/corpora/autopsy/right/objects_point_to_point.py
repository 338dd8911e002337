"""Objects are sent around a chain with send_object_list and recv_object_list.

Ranks: 4
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
message: list = [{"hops": []}]
if rank > 0:
    dist.recv_object_list(message, src=rank - 1)
message[0]["hops"].append(rank)
if rank < size - 1:
    dist.send_object_list(message, dst=rank + 1)
else:
    print(message)
dist.barrier()
dist.destroy_process_group()
