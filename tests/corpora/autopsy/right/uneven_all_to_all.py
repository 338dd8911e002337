"""Tokens are dispatched to experts with the counts exchanged beforehand.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(rank)
experts = torch.randint(0, size, (12,), generator=generator).sort().values
send_counts = experts.bincount(minlength=size)
receive_counts = torch.empty_like(send_counts)
dist.all_to_all_single(receive_counts, send_counts)
tokens = torch.randn(12, 4)
received = torch.empty(int(receive_counts.sum()), 4)
splits = (receive_counts.tolist(), send_counts.tolist())
dist.all_to_all_single(received, tokens, *splits)
returned = torch.empty_like(tokens)
dist.all_to_all_single(returned, received, *reversed(splits))
assert torch.equal(returned, tokens)
dist.destroy_process_group()
