"""Rank 0 reads from a child that answers late; the others wait for its broadcast.

Ranks: 3
"""

import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
seed = torch.zeros(1, dtype=torch.int64)
if dist.get_rank() == 0:
    code = "import time; time.sleep(2.5); print(42)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    seed += int(child.stdout.readline())
    child.wait()
dist.broadcast(seed, src=0)
print(seed.item())
dist.destroy_process_group()
