"""The metric's compute() gathers its state from all ranks; only rank 0 calls it.

Report: https://github.com/Lightning-AI/torchmetrics/issues/938
Ranks: 3
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist


class Accuracy:
    def __init__(self) -> None:
        self.counts = torch.zeros(2)

    def update(self, correct: int, total: int) -> None:
        self.counts += torch.tensor([correct, total])

    def compute(self) -> float:
        states = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(states, self.counts)  # HERE 0: all_gather
        correct, total = torch.stack(states).sum(0)
        return float(correct / total)


dist.init_process_group("gloo")
accuracy = Accuracy()
for epoch in range(3):
    grad = torch.ones(4)
    dist.all_reduce(grad)  # HERE 1,2: all_reduce
    accuracy.update(8, 10)
    if dist.get_rank() == 0 and epoch == 1:
        print("accuracy", accuracy.compute())
dist.destroy_process_group()
