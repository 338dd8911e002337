"""Ranks 1 and 2 know no best checkpoint, so only rank 0 enters the final barrier.

Report: https://github.com/huggingface/optimum-habana/pull/2230
Ranks: 3
Kind: mismatch
Guilty: 0
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
best_model_checkpoint = None
for step in range(1, 5):
    loss = torch.tensor([1.0 / step])
    dist.all_reduce(loss)
    if rank == 0:
        best_model_checkpoint = f"checkpoint-{step}"
if best_model_checkpoint is not None:
    dist.barrier()  # HERE 0: barrier
    print("loading", best_model_checkpoint)
speed = torch.tensor([100.0])
dist.reduce(speed, dst=0)  # HERE 1,2: reduce
dist.destroy_process_group()
