"""A rank without tokens cuts its graph, so its backward issues no collective.

Report: https://github.com/PaddlePaddle/PaddleFormers/pull/3010
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


dist.init_process_group("gloo")
rank = dist.get_rank()
hidden = torch.ones(4, requires_grad=True)
for step in range(3):
    out = Combine.apply(hidden * 2)
    if rank == 1 and step == 1:
        out = torch.zeros(4, requires_grad=True)  # no tokens: an empty result
    out.sum().backward()  # HERE 0: all_to_all
    norm = torch.ones(1)
    dist.all_reduce(norm)  # HERE 1: all_reduce
dist.destroy_process_group()
