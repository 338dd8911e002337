"""Only rank 0 sees the checkpoint file and enters the branch that resumes from it.

Report: https://github.com/KempnerInstitute/KempnerForge/issues/49
Ranks: 4
Kind: mismatch
Guilty: 0
Plain: hang
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
with tempfile.TemporaryDirectory() as folder:  # each node's own disk
    path = Path(folder) / "train_state.pt"
    if rank == 0:
        torch.save({"step": 40}, path)
    dist.barrier()
    step = 0
    if path.exists():
        state = [torch.load(path)]
        dist.broadcast_object_list(state, src=0)  # HERE 0: broadcast
        step = state[0]["step"]
    weights = torch.full((4,), float(step))
    dist.all_reduce(weights)  # HERE 1,2,3: all_reduce
dist.destroy_process_group()
