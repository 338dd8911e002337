"""The driver sends a request to its workers, which have gone on to the next step.

Report: https://github.com/vllm-project/vllm/issues/5531
Ranks: 4
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def execute(step: int) -> None:
    request: list = [{"tokens": [step]} if rank == 0 else None]
    dist.broadcast_object_list(request, src=0)
    logits = torch.ones(8)
    dist.all_reduce(logits)


def list_adapters() -> None:
    dist.broadcast_object_list([{"method": "list"}], src=0)  # HERE 0: broadcast


for step in range(4):
    execute(step)
if rank == 0:
    list_adapters()
else:
    dist.all_reduce(torch.ones(8))  # HERE 1,2,3: all_reduce
dist.destroy_process_group()
