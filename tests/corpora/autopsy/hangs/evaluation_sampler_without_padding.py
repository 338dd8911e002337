"""The evaluation sampler pads nothing, so rank 0 has one batch more to gather.

Report: https://github.com/SeungjunNah/DeepDeblur-PyTorch/issues/44
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
images = TensorDataset(torch.arange(9.0).reshape(9, 1))
mine = Subset(images, range(rank, len(images), size))
psnr = []
for (batch,) in DataLoader(mine, batch_size=1):
    values = [torch.zeros(1, 1) for _ in range(size)]
    dist.all_gather(values, batch)  # HERE 0: all_gather
    psnr += values
dist.barrier()  # HERE 1: barrier
print(rank, len(psnr))
dist.destroy_process_group()
