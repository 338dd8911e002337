"""Each half makes only its own group, so two different groups get the same name.

Report: https://github.com/pytorch/pytorch/issues/38375
Ranks: 4
Kind: mismatch
Guilty: 0,1,2,3
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
members = [0, 1] if rank < 2 else [2, 3]
group = dist.new_group(members)  # HERE 0,1,2,3: new_group
number = torch.tensor(float(rank))
numbers = [torch.zeros(()) for _ in range(2)]
dist.all_gather(numbers, number, group=group)  # HERE 0,1,2,3: all_gather
print(rank, numbers)
dist.barrier()  # HERE 0,1,2,3: barrier
dist.destroy_process_group()
