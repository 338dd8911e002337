"""The bar is disabled off the main process, and the evaluation asks its counter.

Report: https://github.com/huggingface/transformers/issues/31532
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist


class Bar:
    def __init__(self, disable: bool) -> None:
        self.disable, self.n = disable, 0

    def update(self) -> None:
        self.n += not self.disable


dist.init_process_group("gloo")
rank = dist.get_rank()
bar = Bar(disable=rank != 0)
for step in range(10):
    grad = torch.randn(4)
    dist.all_reduce(grad)  # HERE 1: all_reduce
    bar.update()
    if bar.n and bar.n % 4 == 0:
        predictions = [torch.zeros(8) for _ in range(2)]
        dist.all_gather(predictions, torch.ones(8))  # HERE 0: all_gather
dist.destroy_process_group()
