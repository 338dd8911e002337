"""What a warm rank needs to run `main` as torchrun would, and to see what it does."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distlab.comm import Comm
from distlab.comm._call import Wrapper
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.nodes import local_rank, ranks_per_node
from distlab.runner import RankContext

_KEPT: list[Any] = []
"""The store, and what main made. Freeing a DistributedDataParallel after its group was
destroyed can block a process forever (torch 2.13, gloo); ranks just end."""


HOST = "127.0.0.1"


def like_torchrun(context: RankContext, patience_s: float) -> None:
    """Set what torchrun sets; the store that it would run is rank 0's, on any port.

    As it does on several machines: LOCAL_RANK numbers the ranks of one of them.
    """
    on_node = ranks_per_node(context.world_size)
    last = context.world_size % on_node or on_node  # ranks on the last machine
    node, nodes = context.rank // on_node, -(-context.world_size // on_node)
    port = host_store(context, patience_s)
    os.environ.update(
        RANK=str(context.rank),
        LOCAL_RANK=str(local_rank(context.rank, context.world_size)),
        GROUP_RANK=str(node),
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(last if node == nodes - 1 else on_node),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def host_store(context: RankContext, patience_s: float) -> int:
    """The port of a TCPStore at HOST that rank 0's process keeps until it ends.

    Process groups made from it use the loopback interface; a call waits `patience_s`.
    """
    port, store = torch.zeros(1, dtype=torch.int64), None
    if context.rank == 0:
        store = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)
        port[0] = store.port
    unrecorded(context.comm).broadcast(port, 0)
    # By number: a laptop's host name may resolve to an interface that is down.
    loopback = {"Linux": "lo", "Darwin": "lo0"}.get(platform.system())
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    c10d.default_pg_timeout = timedelta(seconds=patience_s)
    _KEPT.append(store)
    return int(port)


def unrecorded(comm: Comm) -> Comm:
    """The communicator itself: a timeline has nothing of what is sent through it."""
    while isinstance(comm, Wrapper):
        comm = comm._inner
    return comm


def keep_wrappers() -> None:
    """From here on no DistributedDataParallel of this process is ever freed."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    make = wrapper.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **named: Any) -> None:
        _KEPT.append(self)
        make(self, *args, **named)

    wrapper.__init__ = made


def watch_groups(seen: dict[str, Any]) -> None:
    """Note as which rank of how many main joins its group."""
    join = dist.init_process_group

    @wraps(join)
    def joined(*args: Any, **named: Any) -> None:
        join(*args, **named)
        seen["groups"].append((dist.get_rank(), dist.get_world_size()))

    dist.init_process_group = joined


@dataclass(frozen=True)
class _Counter:
    """A hook that counts samples; a class, so that a model with it can be pickled."""

    seen: dict[str, Any]

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.seen["samples"] += len(inputs[0]) * torch.is_grad_enabled()
        if self.seen["first"] is None:
            now = weights_of(module)
            start = self.seen.setdefault("start", now)
            self.seen["first"] = None if torch.equal(now, start) else now


def watch_samples(unit: ModuleType, seen: dict[str, Any]) -> None:
    """Count the samples that go through the model in training.

    And keep the weights after the first step: "first".
    """
    make: Callable[[int], nn.Module] = unit.make_model

    def made(seed: int) -> nn.Module:
        model = make(seed)
        model.register_forward_pre_hook(_Counter(seen))
        return model

    unit.make_model = made  # type: ignore[attr-defined]
