"""A handler interrupts rank 0's computation now and then, and prints how far it is.

Ranks: 2
"""

import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ticks = 0


def on_alarm(number: int, frame: object) -> None:
    global ticks
    ticks += 1


if rank == 0:
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
for _ in range(5):
    time.sleep(0.4 * (1 + rank))
    dist.all_reduce(torch.ones(2))
signal.setitimer(signal.ITIMER_REAL, 0)
print(rank, ticks)
dist.destroy_process_group()
