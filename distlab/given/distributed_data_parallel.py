"""The parts of DistributedDataParallel that its unit doesn't teach.

They cover copies, unsupported uses, tensors in any memory format and the outputs of
forward(), and they find out when a backward() ends. At the end, `compare_with_torch`
runs torch's DDP beside your class.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distlab.comm import Comm, TorchComm, Work


class SecondGradientError(RuntimeError):
    """Raised for a gradient of `parameter` that its bucket can no longer take."""

    def __init__(self, message: str, parameter: Tensor) -> None:
        super().__init__(message)
        self.parameter = parameter


class DataParallelModule(nn.Module):
    """A module that has the same parameters and buffers on every rank.

    Every rank must construct it, because the constructor is a collective that
    broadcasts the parameters and buffers of rank 0.

    A subclass fills `arrived` and calls expect_end() in backward(). We refuse the uses
    that aren't supported: sparse gradients, pickling (save module.state_dict()
    instead), and a forward() after a backward() that ended with an error.
    """

    def __init__(self, module: nn.Module, comm: Comm, broadcast_buffers: bool) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.broadcast_buffers = broadcast_buffers
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("no parameter of the module requires a gradient")
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise ValueError(
                    f"{name or part} has sparse gradients, which aren't supported: "
                    "construct it with sparse=False"
                )
        self.find_unused_parameters = False
        self.syncs = True  # False under no_sync()
        self.active = list(range(comm.world_size))  # ranks with a batch, this step
        self.arrived: set[Tensor] = set()  # gradient is ready, in this backward()
        self.unused: list[Tensor] = []  # get no gradient in the next backward()
        self.usage_work: tuple[Tensor, Work] | None = None
        self.expects_end = False
        for tensor in contiguous((*module.parameters(), *module.buffers())):
            comm.broadcast(tensor, 0)

    def watch(self) -> None:
        """Register hooks on the parameters."""
        raise NotImplementedError

    def find_unused(self, outputs: Any) -> list[Tensor]:
        """Return the trainable parameters on which these outputs don't depend."""
        raise NotImplementedError

    def finalize_backward(self) -> None:
        """Finish the gradients; called when all have arrived and backward() ends."""
        raise NotImplementedError

    # ── from forward() to the end of backward() ─────────────────────────────────────

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module and return its outputs.

        Raises:
            RuntimeError: an earlier backward() ended with an error.
        """
        syncs = self.syncs and torch.is_grad_enabled()
        if syncs and self.arrived:
            raise RuntimeError(
                "the last backward() ended with an error, and the ranks may have sent "
                "different gradients: start again from a checkpoint"
            )
        self.expects_end = False
        outputs = self.module(*inputs, **named)
        if syncs:
            for tensor in tensors_in(outputs):
                if tensor.grad_fn is not None:  # a leaf would keep the hook
                    tensor.register_hook(self.at_output)
            if self.find_unused_parameters:
                self.unused = self.find_unused(outputs)
        return outputs

    def at_output(self, _: Tensor) -> None:
        """Called in backward() before any parameter has its gradient.

        A reentrant checkpoint calls backward() inside backward(), and the first
        gradient may become ready in the inner one. The outputs, however, belong to the
        outer one.
        """
        if self.syncs:
            self.expects_end = False
            self.expect_end()

    def expect_end(self) -> None:
        """Make autograd call end_of_backward() before the current backward() ends."""
        if not self.expects_end:
            self.expects_end = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_of_backward)

    def end_of_backward(self) -> None:
        """Called by autograd, once or more often, before backward() returns.

        Raises:
            RuntimeError: some parameter has no gradient.
        """
        self.expects_end = False
        if not self.arrived:  # torch.autograd.grad(), or all is done already
            return
        absent = [p for p in self.trainable if p not in self.arrived]
        if absent:
            advice = "does the loss use every output of forward()?"
            if not self.find_unused_parameters:
                advice = "set find_unused_parameters=True"
            raise RuntimeError(
                f"{len(absent)} parameters, such as {self.name_of(absent[0])}, got no "
                f"gradient in this backward(): {advice}"
            )
        self.finalize_backward()
        self.arrived.clear()

    def refuse_second(self, parameter: Tensor) -> NoReturn:
        """Raise an error that says why this bucket can't take another gradient."""
        name = self.name_of(parameter)
        if parameter in set(self.unused):
            message = (
                f"{name} has a gradient, but the outputs of the last forward() do not "
                "depend on it: return every loss from forward(), call backward() after "
                "each forward(), and use no reentrant checkpoint"
            )
        else:
            message = (
                f"{name} has a second gradient in one backward(): two reentrant "
                "checkpoints use it, or an earlier backward() ended with an error"
            )
        raise SecondGradientError(message, parameter)

    def name_of(self, parameter: Tensor) -> str:
        """Return the first name that the parameter has in the module."""
        named = self.module.named_parameters()
        return next(name for name, p in named if p is parameter)

    # ── buffers, copies ─────────────────────────────────────────────────────────────

    def shared_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that all ranks share."""
        return contiguous(self.module.buffers() if self.broadcast_buffers else ())

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelModule:
        """Copy the module but keep this rank's comm; this sends nothing."""
        memo[id(self.comm)] = self.comm
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.watch()
        return twin

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: save module.state_dict()"
        )

    # ── which parameters are used, and by which ranks: 3.23 ─────────────────────────

    def all_reduce_usage(self, has_batch: bool) -> tuple[Tensor, Work]:
        """Start counting the ranks that have a batch, and used parameters; collective.

        The sum has one number for each rank, then one for each trainable parameter.
        """
        comm, unused = self.comm, set(self.unused)
        counts = [rank == comm.rank for rank in range(comm.world_size)]
        counts += [p not in unused or p.grad is not None for p in self.trainable]
        usage = torch.tensor(counts, dtype=torch.int32, device=comm.device) * has_batch
        work = comm.all_reduce(usage, async_op=True)
        assert work is not None
        return usage, work

    def wait_usage(self) -> list[Tensor]:
        """Set self.active; return the parameters for which no rank has a gradient."""
        if self.usage_work is None:
            return []
        (usage, work), self.usage_work = self.usage_work, None
        work.wait()
        n = self.comm.world_size
        self.active = [rank for rank in range(n) if usage[rank]]
        pairs = zip(self.trainable, usage[n:].tolist(), strict=True)
        return [parameter for parameter, count in pairs if not count]


def flat_for(parameters: Sequence[Tensor]) -> Tensor:
    """Make a vector with room for all gradients, in float32 if they are float16.

    A float16 sum above 65,504 is inf, even if the mean over the ranks fits.
    """
    dtype = parameters[0].dtype
    size = sum(parameter.numel() for parameter in parameters)
    wide = torch.float32 if dtype is torch.float16 else dtype
    return parameters[0].new_empty(size, dtype=wide)


def tensors_in(outputs: Any) -> list[Tensor]:
    """Return the tensors, even in containers, that require a gradient."""
    found = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def contiguous(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor, or a contiguous copy that is written back after its use."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        yield values
        if not tensor.is_contiguous():
            with torch.no_grad():
                tensor.copy_(values)


# ── your class beside torch's ─────────────────────────────────────────────────────────

NUM_RANKS, NUM_STEPS, WIDTH = 2, 8, 512
Wrap = Callable[..., nn.Module]


def compare_with_torch(yours: Wrap) -> None:
    """Print losses and times for the same steps with your class and with torch's."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = mp.spawn  # type: ignore[attr-defined]
        spawn(_train, (yours, folder), NUM_RANKS)


def _train(rank: int, yours: Wrap, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    layers = [p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()
    both = [
        yours(copy.deepcopy(model), TorchComm.from_default(), bucket_size_mib=4),
        nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4),
    ]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in both]
    torch.manual_seed(rank)
    inputs = torch.randn(64, WIDTH, dtype=torch.float64)
    if rank == 0:
        print("step   yours: loss, ms              torch's: loss, ms")
    for step in range(NUM_STEPS):
        row = []
        for ddp, optimizer in zip(both, optimizers, strict=True):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = (ddp(inputs) - inputs[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            took_ms = 1000 * (time.perf_counter() - started)
            row.append(f"{float(loss.detach()):.12f}  {took_ms:6.1f}")
        if rank == 0:
            print(f"{step:4}   {row[0]:26}    {row[1]}")
    dist.destroy_process_group()
