"""Only rank 0 loads the checkpoint, after DDP has sent the weights around.

After https://github.com/intelligent-machine-learning/dlrover/pull/1034
Finds: replicas-differ
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def resume(model, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])  # MISTAKE


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        old = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        if rank == 0:  # MISTAKE
            torch.save({"model": old.state_dict()}, path)
            resume(model, path)  # MISTAKE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(4, 8, 3):
        x = batch[rank::world_size]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
