"""A daemon thread waits on an empty queue all the time and communicates never.

Ranks: 2
"""

import queue
import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
lines: queue.Queue[str] = queue.Queue()


def write_lines() -> None:
    while True:
        print(lines.get())


threading.Thread(target=write_lines, daemon=True).start()
for step in range(4):
    time.sleep(0.5 * dist.get_rank())
    dist.all_reduce(torch.ones(4))
    lines.put(f"step {step}")
time.sleep(0.5)
dist.destroy_process_group()
