"""A thread reduces metrics in a group of its own while the main thread trains.

Ranks: 2
"""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
metrics_group = dist.new_group()
stop_after = 6


def report() -> None:
    for _ in range(stop_after):
        time.sleep(0.3)
        metric = torch.rand(1)
        dist.all_reduce(metric, group=metrics_group)


thread = threading.Thread(target=report)
thread.start()
for step in range(20):
    grad = torch.ones(64)
    dist.all_reduce(grad)
    time.sleep(0.05 * (1 + dist.get_rank()))
thread.join()
dist.destroy_process_group()
