"""Stages of an interleaved pipeline all send before they receive, in a circle.

Report: https://github.com/pytorch/pytorch/issues/172668
Ranks: 4
Kind: deadlock
Guilty: 0,1,2,3
Plain: hang
"""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    activation = torch.randn(8, 16)
    dist.broadcast(activation, src=0)
    incoming = torch.empty(8, 16)
    for _ in range(4):
        dist.send(activation, dst=following)  # HERE 0,1,2,3: send
        dist.recv(incoming, src=previous)
        activation = torch.tanh(incoming)
    dist.destroy_process_group()


main()
