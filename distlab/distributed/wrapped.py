"""Wrap a model in one of three engines: the units' DDP, torch's DDP, or FSDP2.

You call each of them like the model. no_sync() keeps backward() from sending anything,
and whole() returns the full model, with the same buffers on every rank, for an
evaluation.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distlab.comm import (
    Comm,
    TorchComm,
    Wrapper,
    leave_default_group,
    open_default_group,
)
from distlab.distributed.agreement import agreed, describe
from distlab.distributed.data_parallel import DistributedDataParallel
from distlab.distributed.group import before_destruction
from distlab.dtensors import gathered

ENGINES = ("scratch", "ddp", "fsdp2")


class Wrapped:
    """A replicated model behind `engine`, which you call instead of the model."""

    def __init__(self, model: nn.Module, engine: Any, comm: Comm) -> None:
        self.model, self.engine, self.comm = model, engine, comm

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the model."""
        outputs: Tensor = self.engine(inputs)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep backward() from sending anything in this block."""
        block: AbstractContextManager[None] = self.engine.no_sync()
        return block

    def whole(self) -> nn.Module:
        """Return the model with rank 0's buffers on every rank; collective.

        torch's DDP copies them only at its next forward(), so the running statistics of
        batch norm differ until then.
        """
        for buffer in self.model.buffers():
            self.comm.broadcast(buffer, 0)
        return self.model


class WrappedSharded(Wrapped):
    """A model whose parameters are sharded over the ranks by FSDP2's fully_shard."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.copy = copy.deepcopy(model)
        mesh = init_device_mesh(comm.device.type, (comm.world_size,))
        for part in model.modules():
            if isinstance(part, nn.Sequential):
                for block in part:
                    if any(True for _ in block.children()):
                        fully_shard(block, mesh=mesh)
        super().__init__(model, fully_shard(model, mesh=mesh), comm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward() keep unsharded gradients and send nothing in this block."""
        self.engine.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.engine.set_requires_gradient_sync(True)

    def gather(self) -> None:
        """Give `copy` all weights and this rank's buffers; collective."""
        weights = {
            name: gathered(value) for name, value in self.model.state_dict().items()
        }
        self.copy.load_state_dict(weights)

    def whole(self) -> nn.Module:
        """Return a model with all weights and rank 0's buffers; collective."""
        self.gather()
        for buffer in self.copy.buffers():
            self.comm.broadcast(buffer, 0)
        return self.copy


def wrap(engine: str, model: nn.Module, comm: Comm, hook: Any = None) -> Wrapped:
    """Wrap the model in an engine, with rank 0's weights; collective.

    With every engine, the ranks first check that their models agree.

    `hook(comm, bucket)` compresses gradients, and only "scratch" supports it. FSDP2
    replaces the parameters of `model`, so create the optimizer afterwards. "ddp" and
    "fsdp2" need torch's default group. If we have to create that group,
    destroy_process_group() also ends it.

    Raises:
        ValueError: there is no such engine, the engine needs one of torch's process
            groups but `comm` isn't one, the engine takes no hook, or the models differ
            between ranks.
    """
    if engine not in ENGINES:
        raise ValueError(f"no engine is called {engine!r}: {', '.join(ENGINES)}")
    if engine == "scratch":
        ours = DistributedDataParallel(model, comm, comm_hook=hook)
        return Wrapped(model, ours, comm)
    if hook is not None:
        raise ValueError(f"engine {engine} takes no compression hook: choose scratch")
    agreed(comm, lambda: describe(model), "give every rank the same model")
    _default_group(engine, comm)
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.detach(), 0)
    if engine == "fsdp2":
        return WrappedSharded(model, comm)
    theirs = nn.parallel.DistributedDataParallel(model)
    return Wrapped(model, theirs, comm)


def _default_group(engine: str, comm: Comm) -> None:
    """Create torch's default group, over the store through which the ranks have met."""
    inner = comm
    while isinstance(inner, Wrapper):
        inner = inner._inner
    if not isinstance(inner, TorchComm):
        raise ValueError(f"engine {engine} needs the backend gloo or nccl")
    opened = open_default_group(
        "nccl" if comm.device.type == "cuda" else "gloo",
        comm.device,
        store=PrefixStore("torch", inner.store),
        rank=comm.rank,
        world_size=comm.world_size,
        timeout=timedelta(seconds=inner.timeout_s),
    )
    if opened is not None:
        before_destruction(functools.partial(leave_default_group, opened))
