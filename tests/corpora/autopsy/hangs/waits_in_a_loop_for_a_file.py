"""Rank 1 polls for a file that rank 0 will write after the collective.

Report: https://github.com/dylanyunlon/Neuron_SP/issues/73
Ranks: 2
Kind: apart
Guilty: 1
Plain: hang
"""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
path = f"/tmp/vocabulary-{os.environ['TORCHELASTIC_RUN_ID']}.json"
dist.barrier()
if rank == 1:
    while not os.path.exists(path):
        time.sleep(0.1)  # HERE 1: apart
sizes = torch.tensor([rank])
dist.all_reduce(sizes)  # HERE 0: all_reduce
if rank == 0:
    with open(path, "w") as file:
        file.write("{}")
dist.destroy_process_group()
