"""Train with torch's own engines: DDP, its sharded optimizer, fully_shard.

backend       zero_stage    what a rank holds of the others' state
pytorch-ddp   0             everything is replicated
pytorch-ddp   1             optimizer state is sharded
fsdp2         2             and gradients; parameters stay after forward
fsdp2         3             and parameters, gathered again in backward
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from distlab.comm import leave_default_group, open_default_group
from distlab.distributed.environment import read_local_rank, read_place
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.optimizers import Make, make_optimizer, named_state
from distlab.engines.strategies import register_strategy
from distlab.engines.strategy import DTYPES, Strategy, make_scaler

TIMEOUT = timedelta(minutes=10)


class InDefaultGroup(Strategy):
    """A rank of torch.distributed's default group, which it creates if there is none.

    Raises:
        EngineError: the group can't be created.
    """

    def __init__(self, config: DistributedConfig, model: nn.Module) -> None:
        super().__init__(config)
        self.device = device_of_rank(config.communication_backend)
        self.opened = open_group(config.communication_backend, self.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = model.to(self.device)

    @contextlib.contextmanager
    def left_on_error(self) -> Iterator[None]:
        """Leave the group again if the constructor's remaining steps fail."""
        try:
            yield
        except BaseException:
            InDefaultGroup.close(self)
            raise

    def sum(self, tensor: Tensor) -> Tensor:
        """Implement `Strategy.sum`."""
        dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        """Implement `Strategy.close`."""
        opened, self.opened = self.opened, None
        if opened is not None:
            leave_default_group(opened)  # the caller may keep torch's DDP a bit longer


class Torch(InDefaultGroup):
    """Trains with DDP, with or without ZeroRedundancyOptimizer, or with fully_shard.

    Raises:
        EngineError: the group can't be created.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Make | None,
    ) -> None:
        super().__init__(config, model)
        with self.left_on_error():
            own = make_optimizer(model, optimizer)
            if config.backend == "fsdp2":
                self._shard(own)
            else:
                self._replicate(own)
            self.scaler = make_scaler(config, self.device)

    # ── wrapping ────────────────────────────────────────────────────────────────────

    def _replicate(self, optimizer: torch.optim.Optimizer) -> None:
        config = self.config
        ddp = nn.parallel.DistributedDataParallel(
            self.module,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=config.find_unused_parameters,
        )
        add_hook(ddp, config.compression)
        self.forward, self.ddp = ddp, ddp
        self.optimizer = optimizer
        if config.stage == 1:
            self.optimizer = sharded_optimizer(optimizer)

    def _shard(self, optimizer: torch.optim.Optimizer) -> None:
        before = dict(self.module.named_parameters())
        for tensor in self.module.state_dict().values():
            if isinstance(tensor, Tensor):  # not what get_extra_state() returns
                dist.broadcast(tensor, 0)
        fully_sharded(self.module, self.config)
        after = dict(self.module.named_parameters())
        new = {id(before[name]): after[name] for name in before}
        for group in optimizer.param_groups:
            group["params"] = [new[id(p)] for p in group["params"]]
        self.forward, self.optimizer = self.module, optimizer

    # ── a step ──────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Implement `Strategy.no_sync`."""
        if not isinstance(self.module, FSDPModule):
            with self.ddp.no_sync():
                yield
            return
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Implement `Strategy.autocast`; fully_shard casts by its own policy."""
        if self.config.backend == "fsdp2":
            yield
            return
        with super().autocast():
            yield

    def share_overflow(self) -> None:
        """Implement `Strategy.share_overflow`; a rank with shards only sees its own."""
        if self.config.backend == "fsdp2" and self.scaler:
            for flag in self.scaler._found_inf_per_device(self.optimizer).values():
                local = flag.to_local() if hasattr(flag, "to_local") else flag
                dist.all_reduce(local, dist.ReduceOp.MAX)

    # ── all ranks together ──────────────────────────────────────────────────────────

    def optimizer_state(self) -> dict[str, Any]:
        """Implement `Strategy.optimizer_state`."""
        if self.config.stage != 1:
            return super().optimizer_state()
        zero: Any = self.optimizer
        zero.consolidate_state_dict(to=0)
        state = [zero.state_dict() if self.rank == 0 else None]
        dist.broadcast_object_list(state, 0)
        found: Any = state[0]
        return named_state(self.optimizer, found, self.names())

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Implement `Strategy.load`."""
        if self.config.backend == "fsdp2":
            weights, state = self._cut(weights, state)
        super().load(weights, state)

    def _cut(
        self, weights: dict[str, Tensor], state: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's shards of full values."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parts = self.module.state_dict()

        def shard(name: str, value: Any) -> Any:
            part = parts[name]
            if not isinstance(part, DTensor) or getattr(value, "ndim", 0) == 0:
                return value
            placed = value.to(part.device_mesh.device_type)
            cut = distribute_tensor(placed, part.device_mesh, part.placements)
            return cut.to(part.to_local().device)

        own = {
            name: {key: shard(name, value) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        cut = {name: shard(name, value) for name, value in weights.items()}
        return cut, {**state, "state": own}

    def close(self) -> None:
        """Implement `Strategy.close`.

        We drop DDP before the group. If we didn't, some ranks would never end. They
        used to hang in the garbage collection at the interpreter's end, which destroys
        DDP's reducer and with it the last reference to the gloo group.
        """
        self.__dict__.pop("ddp", None)
        self.__dict__.pop("forward", None)
        gc.collect()
        super().close()


def device_of_rank(wire: str | None, number: int | None = None) -> torch.device:
    """Return the GPU with this rank's local number (LOCAL_RANK), or the CPU.

    Raises:
        EngineError: you asked for nccl but this rank has no GPU, or LOCAL_RANK is
            impossible.
    """
    num_gpus = torch.cuda.device_count()
    try:
        local_rank = read_local_rank() if number is None else number
    except ValueError as error:
        raise EngineError(str(error)) from error
    if wire == "nccl" and local_rank >= num_gpus:
        raise EngineError(
            f"communication_backend nccl needs a GPU for each rank; local rank "
            f"{local_rank} has none of {num_gpus}: choose gloo"
        )
    if num_gpus == 0 or wire == "gloo" or local_rank >= num_gpus:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def open_group(wire: str | None, device: torch.device) -> Any:
    """Meet the other ranks if RANK is set; otherwise open a group of one process.

    Returns the group, or None if there was one already.
    """
    place: dict[str, Any] = {}
    backend = wire or ("nccl" if device.type == "cuda" else "gloo")
    try:
        if "RANK" in os.environ:
            read_place()  # torch's own errors don't name the variable
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            place = {"store": store, "rank": 0, "world_size": 1}
        return open_default_group(backend, device, timeout=TIMEOUT, **place)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = str(error).splitlines()[0]
        raise EngineError(f"the ranks cannot meet at {where}: {first}") from error


def add_hook(ddp: nn.parallel.DistributedDataParallel, compression: str) -> None:
    """Make `ddp` compress the gradients that it sends."""
    if compression == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compression == "powersgd":
        # Buckets are built anew at iteration 1; the approximation starts after that.
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif compression == "bf16":
        if next(ddp.parameters()).device.type == "cpu":
            raise EngineError("compression bf16 needs nccl: gloo cannot sum bfloat16")
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def sharded_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create a ZeRO stage 1 optimizer with the same class, groups and settings."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        optimizer.param_groups, type(optimizer), **accepted_defaults(optimizer)
    )


def accepted_defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the defaults with which you can create another optimizer of this class.

    A class may add some that it sets itself: AdamW's decoupled_weight_decay, for
    example, comes from Adam.
    """
    names: set[str] = set()
    for kind in type(optimizer).__mro__:
        if kind is torch.optim.Optimizer:  # **options up to here: the class takes any
            return dict(optimizer.defaults)
        parameters = inspect.signature(kind).parameters
        names |= parameters.keys()
        if all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
            break
    return {name: v for name, v in optimizer.defaults.items() if name in names}


def fully_sharded(model: nn.Module, config: DistributedConfig) -> None:
    """Shard `model` in place: each layer by itself, then everything else."""
    dtype = DTYPES.get(config.precision or "")
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None
    )
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.offload_params
        else OffloadPolicy()
    )
    for part in (*layers_of(model), model):
        fully_shard(
            part,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=config.stage == 3,
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the children with parameters, with lists of layers expanded.

    Returns None if two of them share a parameter, so that only their parent can be
    sharded.
    """
    found: list[nn.Module] = []
    for child in model.children():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential)
        found += layers_of(child) if is_list else [child]
    found = [layer for layer in found if any(True for _ in layer.parameters())]
    owned = [id(p) for layer in found for p in layer.parameters()]
    return found if len(owned) == len(set(owned)) else []


def expect_both_offloaded(config: DistributedConfig) -> None:
    """Refuse to offload the optimizer alone.

    Raises:
        EngineError: only offload_optimizer is given.
    """
    if config.offload_optimizer and not config.offload_params:
        raise EngineError(
            "offload_optimizer without offload_params: fsdp2 offloads both or neither"
        )


OF_DDP: dict[str, Any] = {
    "zero_stages": (0, 1),
    "compressions": ("none", "fp16", "bf16", "powersgd"),
    "trains_loss": True,
    "keeps_optimizer": True,
}
"""The facts about torch's DDP, whoever starts the ranks."""

register_strategy("pytorch-ddp", Torch, takes=("find_unused_parameters",), **OF_DDP)
register_strategy(
    "fsdp2",
    Torch,
    zero_stages=(2, 3),
    default_stage=3,
    takes=("offload_params", "offload_optimizer"),
    check=expect_both_offloaded,
    keeps_optimizer=True,
)
