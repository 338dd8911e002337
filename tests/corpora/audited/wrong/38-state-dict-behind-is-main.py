"""The full state is asked for behind `if is_main`, as one does with DDP.

After https://github.com/kyuz0/amd-strix-halo-llm-finetuning/pull/6
Finds: save-needs-all
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, folder):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.folder = Path(folder)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def fit(self, data):
        for batch in data:
            x = batch[self.rank :: self.world_size]
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), x).backward()
            self.optimizer.step()

    def save_model(self):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)  # MISTAKE
        torch.save(state, self.folder / "final.pt")


def main():
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(folder)
        trainer.fit(torch.randn(3, 8, 6))
        if trainer.is_main:  # MISTAKE
            trainer.save_model()  # MISTAKE
    dist.destroy_process_group()


main()
