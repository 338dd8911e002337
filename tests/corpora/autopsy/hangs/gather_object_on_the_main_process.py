"""gather_object is called in the block that only the main process enters.

Report: https://github.com/huggingface/accelerate/issues/2733
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
prompts = ["a", "b", "c", "d"]
texts = [prompt * 3 for prompt in prompts[rank::size]]
dist.barrier()
if rank == 0:
    collected: list = [None] * size
    dist.gather_object(texts, collected, dst=0)  # HERE 0: all_gather
    print(collected)
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
