"""Modules: where each parameter was made, what DDP holds, and every outermost call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import _fully_shard
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distlab.audit.fingerprints import digest_of
from distlab.audit.log import Memory, current
from distlab.audit.places import here
from distlab.audit.watching.patches import Patches


def watch(patches: Patches) -> None:
    """Install the hooks."""
    patches.keep(modules.register_module_parameter_registration_hook(_born))
    patches.keep(modules.register_module_forward_pre_hook(_begins))
    patches.keep(modules.register_module_forward_hook(_ends, always_call=True))
    patches.observe(DistributedDataParallel, "__init__", after=_wrapped)
    patches.observe(nn.Module, "load_state_dict", after=_loaded)
    patches.observe(Join, "__enter__", before=_joined)
    for owner in (fsdp, _fully_shard):
        patches.observe(owner, "fully_shard", after=_sharded)
    patches.observe(fsdp.FullyShardedDataParallel, "__init__", after=_fsdp_made)


def _joined(memory: Memory, *args: Any) -> None:
    memory.log.add("join")


def _born(module: nn.Module, name: str, parameter: Any) -> None:
    memory = current()
    if memory is None or parameter is None:
        return
    place = here()
    if place is not None:
        memory.born.setdefault(id(parameter), place)
        memory.kept[id(parameter)] = parameter


def learn_names(memory: Memory, module: nn.Module) -> None:
    """Remember what this module calls its parameters, as far as nobody named them."""
    for name, parameter in module.named_parameters():
        memory.names.setdefault(id(parameter), name.removeprefix("module."))
        memory.kept[id(parameter)] = parameter


def is_parameter(memory: Memory, tensor: Tensor) -> bool:
    """Return True if a tensor has the memory of a known, unsharded parameter."""
    where = tensor.data_ptr()
    known = (memory.kept.get(key) for key in memory.names)
    return where != 0 and any(
        isinstance(p, Tensor) and not hasattr(p, "to_local") and p.data_ptr() == where
        for p in known
    )


def _wrapped(
    memory: Memory, _: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any
) -> None:
    learn_names(memory, ddp.module)
    for inner in ddp.module.modules():
        memory.inner_of[id(inner)] = memory.number("ddp", ddp)
        memory.kept[id(inner)] = inner
    named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    born = {name: memory.born.get(id(p)) for name, p in named}
    memory.log.add(
        "ddp",
        names=[name for name, _ in named if name not in ignored],
        born=born,
        find_unused=ddp.find_unused_parameters,
        static=bool(getattr(ddp, "static_graph", False)),
        size=ddp.process_group.size(),
    )


def _fsdp_made(memory: Memory, _: None, *args: Any, **kwargs: Any) -> None:
    memory.log.add("sharded")


def _sharded(memory: Memory, _: None, module: Any, *args: Any, **kwargs: Any) -> None:
    memory.log.add("sharded")
    if isinstance(module, nn.Module):
        learn_names(memory, module)


def _loaded(memory: Memory, *args: Any, **kwargs: Any) -> None:
    memory.log.add("loaded")


def _begins(module: nn.Module, inputs: Any) -> None:
    memory = current()
    if memory is None:
        return
    memory.depth += 1
    if memory.depth > 1 or "torch.nn.modules.loss" in type(module).__module__:
        return
    is_ddp = isinstance(module, DistributedDataParallel)
    learn_names(memory, module)
    memory.log.add(
        "forward",
        ddp=memory.number("ddp", module) if is_ddp else None,
        inside=None if is_ddp else memory.inner_of.get(id(module)),
        training=module.training,
        grad=torch.is_grad_enabled(),
        inputs=digest_of(list(inputs)),
        rows=_rows(inputs),
        has_parameters=any(p.requires_grad for p in module.parameters()),
        syncs=not is_ddp or bool(getattr(module, "require_backward_grad_sync", True)),
        local_norms=_local_norms(module),
    )


def _ends(module: nn.Module, inputs: Any, output: Any) -> None:
    memory = current()
    if memory is not None:
        memory.depth = max(0, memory.depth - 1)


def _rows(inputs: Any) -> int:
    """Return the length of the first tensor among the inputs, 0 without one."""
    for value in inputs:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return 0


def _local_norms(module: nn.Module) -> bool:
    """Return True if it has batch norms that look at this rank's samples only."""
    return any(
        isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) and m.training
        for m in module.modules()
    )
