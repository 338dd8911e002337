"""Rank 0 stops generating at the end token; its workers expect another step.

Report: https://github.com/NVIDIA/TensorRT-LLM/issues/1767
Ranks: 2
Kind: absent
Guilty: 0
Plain: error
"""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for position in range(16):
        logits = torch.ones(32)
        dist.all_reduce(logits)  # HERE 1: all_reduce
        token = 2 if position == 5 else 7
        if rank == 0 and token == 2:
            print("finished", position)
            return
    dist.destroy_process_group()


main()
