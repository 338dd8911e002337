"""Each rank's accuracy over its padded share, averaged.

After https://github.com/areal-project/AReaL/pull/1096
Finds: padded-evaluation
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)  # MISTAKE
    return tensor.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    questions = TensorDataset(torch.randn(33, 5), torch.randint(0, 2, (33,)))
    spread = DistributedSampler(questions, shuffle=False)  # MISTAKE
    loader = DataLoader(questions, batch_size=4, sampler=spread)
    model = DDP(nn.Linear(5, 2)).eval()
    right = [model(x).argmax(1).eq(y) for x, y in loader]
    mine = torch.cat(right).float().mean().item()
    accuracy = average(mine)  # MISTAKE
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}")
    dist.destroy_process_group()


main()
