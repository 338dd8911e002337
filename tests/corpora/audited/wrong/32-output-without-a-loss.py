"""The value head's output is returned, but this phase's loss leaves it out.

After https://github.com/HorizonRobotics/alf/pull/1117
Finds: unused-parameters
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, observed, actions):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observed, 12), nn.Tanh())
        self.policy = nn.Linear(12, actions)
        self.value = nn.Sequential(
            nn.Linear(12, 6),  # MISTAKE
            nn.Tanh(),
            nn.Linear(6, 1),  # MISTAKE
        )

    def forward(self, x):
        hidden = self.trunk(x)
        return self.policy(hidden), self.value(hidden)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(ActorCritic(4, 3))  # MISTAKE
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    observations = torch.randn(3, 32, 4)
    taken = torch.randint(0, 3, (3, 32))
    for x, action in zip(observations, taken):
        logits, _ = net(x[rank::world_size])
        loss = nn.functional.cross_entropy(logits, action[rank::world_size])  # MISTAKE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
