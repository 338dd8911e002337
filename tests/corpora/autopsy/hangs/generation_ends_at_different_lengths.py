"""Ranks reach the end of their text at different steps of a sharded model.

Report: https://github.com/deepspeedai/DeepSpeed/issues/8262
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
fully_shard(model[1])
fully_shard(model)
answer_lengths = (3, 6)
tokens = [1]
with torch.no_grad():
    for position in range(8):
        logits = model(torch.tensor(tokens[-1:]))  # HERE 1: all_gather
        tokens.append(int(logits.argmax()))
        if position == answer_lengths[rank]:
            break  # the end-of-text token
reward = torch.tensor([float(len(tokens))])
dist.all_reduce(reward)  # HERE 0: all_reduce
dist.destroy_process_group()
