"""A small torch.distributed, built from the code that you write in the course.

    import distlab.distributed as dist

    dist.init_process_group("gloo")           # or "nccl", or "tcp"
    model = dist.DistributedDataParallel(model)
    sampler = dist.DistributedSampler(dataset)

Each name runs the code of one or more tasks. For each task, that is your own code if it
has passed, and the reference's otherwise. `get_distributed_info()["units"]` lists which
one runs, and `distlab use` lets you choose.
"""

from distlab.comm import ReduceOp
from distlab.distributed.checkpointing import checkpoint_scope
from distlab.distributed.checkpoints import load_checkpoint, save_checkpoint
from distlab.distributed.data_parallel import (
    DistributedDataParallel,
    no_sync,
    sync_gradients,
)
from distlab.distributed.elastic_training import elastic
from distlab.distributed.group import (
    default_comm,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from distlab.distributed.model_parallel import PipelineParallel, TensorParallel
from distlab.distributed.parts import UnitError
from distlab.distributed.pool import memory_pool_scope
from distlab.distributed.primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from distlab.distributed.sampler import DistributedSampler

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "PipelineParallel",
    "ReduceOp",
    "TensorParallel",
    "UnitError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "checkpoint_scope",
    "default_comm",
    "destroy_process_group",
    "elastic",
    "gather",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "load_checkpoint",
    "memory_pool_scope",
    "no_sync",
    "recv",
    "reduce",
    "reduce_scatter",
    "save_checkpoint",
    "scatter",
    "send",
    "sync_gradients",
]
