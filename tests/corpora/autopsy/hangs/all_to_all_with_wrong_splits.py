"""The output splits aren't the transpose of the other ranks' input splits.

Report: https://github.com/pytorch/pytorch/issues/117486
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(2):
    dist.all_to_all_single(torch.empty(4), torch.arange(4.0))
tokens = torch.arange(6.0) + 10 * rank
send_counts = [[2, 4], [3, 3]][rank]
receive_counts = [[2, 4], [4, 2]][rank]
received = torch.empty(sum(receive_counts))
dist.all_to_all_single(  # HERE 0,1: all_to_all
    received, tokens, receive_counts, send_counts
)
print(rank, received.tolist())
dist.barrier()
dist.destroy_process_group()
