"""A data-dependent dispatch uses all_gather on one rank and reduce on the others.

Report: https://github.com/vllm-project/vllm/issues/43547
Ranks: 4
Kind: mismatch
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(17):
    hidden = torch.ones(6)
    few_tokens = rank == 2 and step == 14
    if few_tokens:
        parts = [torch.empty(6) for _ in range(size)]
        dist.all_gather(parts, hidden)  # HERE 2: all_gather
        hidden = torch.stack(parts).sum(0)
    else:
        dist.all_reduce(hidden)  # HERE 0,1,3: all_reduce
dist.destroy_process_group()
