"""Metrics are reduced key by key, and rank 1 logs a key the others don't have.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/19106
Ranks: 3
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist


def log_dict(metrics: dict[str, float]) -> dict[str, float]:
    reduced = {}
    for name, value in metrics.items():
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)  # HERE 1: all_reduce
        reduced[name] = tensor.item() / dist.get_world_size()
    return reduced


dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(6):
    metrics = {"loss": 1.0 / (step + 1)}
    if rank == 1 and step == 3:
        metrics["rare_class_recall"] = 0.5
    log_dict(metrics)
    dist.barrier()  # HERE 0,2: barrier
dist.destroy_process_group()
