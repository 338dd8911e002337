"""Gradients leave while backward() still computes: what DistributedDataParallel does.

Guide: phase3_multi_node/guide/distributed_data_parallel.md.
Source: S. Li et al., PyTorch Distributed (arXiv 2006.15704), sections 3.2 and 4.2.
Symbols: n = comm.world_size; S = the bytes of all gradients.
Cost: S goes through all_reduce, most of it while backward() computes; S of memory more.

    backward   layer 4 │ layer 3 │ layer 2 │ layer 1 │
    bucket 0           └─▶ all_reduce of 4, 3 ▒▒▒▒▒▒▒│▒▒     finish: wait, copy back
    bucket 1                               └─▶ of 2, 1 ▒▒▒▒▒▒│▒▒▒▒

backward() comes to the last layer first. So its gradient is ready first, and can leave
while those of the layers before it are still to be computed. One message per parameter
would be too many; so parameters are put together in buckets. `python` with the name of
this file trains yours beside torch's.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from distlab.comm import Comm, TorchComm, Work

CommHook = Callable[[Comm, Tensor], Work]


def assign_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Share out the tensors into buckets, the last tensor into the first bucket.

    C1 each tensor is in one bucket; inside a bucket, and from bucket to bucket, they
    come from the last to the first
    C2 a bucket has at most bucket_bytes, unless it is one tensor alone; and the next
    tensor does not fit into it any more
    C3 all tensors of a bucket have one dtype and one device
    In torch.distributed: DistributedDataParallel does it when it is made
    Example: 8, 8, 40 and 8 bytes, at most 16 → [8], [40], [8, 8], the last one first
    Cost: none. Check: distlab check 3.9
    """
    # TODO(distributed_data_parallel.buckets)
    # when does a bucket end and the next one begin?
    raise NotImplementedError("distributed_data_parallel.buckets")


def pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Fill `flat`, in place, with all numbers of the tensors, one after another.

    Given: `flat` (as many numbers,), of the same dtype and device. A tensor may have
    any shape, none at all, and need not be contiguous.

    C4 unpack gives every tensor back what pack took from it; flat is filled in place
    """
    # TODO(distributed_data_parallel.buckets)
    # what is the shape of `flat`, and what that of a tensor?
    raise NotImplementedError("distributed_data_parallel.buckets")


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Give the tensors, in place, the numbers that `flat` has for them: see `pack`."""
    # TODO(distributed_data_parallel.buckets)
    # the other way round
    raise NotImplementedError("distributed_data_parallel.buckets")


def start_all_reduce(comm: Comm, flat: Tensor) -> Work:
    """Begin to add up `flat` over the ranks, in place, and come back at once.

    What is returned has a `wait()`, which comes back when the sum is there.
    """
    # TODO(distributed_data_parallel.hooks)
    # which argument of comm.all_reduce says that you do not want to wait for it?
    raise NotImplementedError("distributed_data_parallel.hooks")


class Bucket:
    """Parameters whose gradients travel together, in `flat`."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_empty(size)
        self.num_ready = 0  # of their gradients, in this backward()
        self.work: Work | None = None  # the transfer, once it has begun

    def gradients(self) -> list[Tensor]:
        """The .grad of its parameters, in their order."""
        found = [p.grad for p in self.parameters if p.grad is not None]
        missing = len(self.parameters) - len(found)
        if missing:
            raise RuntimeError(f"{missing} gradients of a bucket are not there yet")
        return found


class DistributedDataParallel(nn.Module):
    """The module itself; but when backward() returns, gradients are means over ranks.

    Collective: every rank makes one, from a module of the same architecture. Weights
    and buffers become rank 0's. `comm_hook` replaces `start_all_reduce`. With
    `find_unused_parameters` the ranks tell each other in each step who has a batch and
    a gradient for what: see 3.23.

    3.10 C1 a bucket's all_reduce begins as soon as its last gradient is ready; a weight
            with two names has one gradient
         C2 the buckets begin in the same order on every rank, whatever is ready first
         C3 nobody waits for a message while backward() computes
    3.11 C1 when backward() returns, every .grad is the mean over the ranks, in each
            step, also if .grad was None before or is zeroed in place
         C2 buffers are then rank 0's, on every rank
         C3 under no_sync() nothing is sent; .grad adds up until a backward() outside it
    3.23 C1 a parameter without a gradient on some ranks counts as zero there
         C2 without one on any rank, its .grad stays None
         C3 a rank without batches takes part by join(); the mean is over those that
            have one, and all leave join() together
    In torch.distributed: torch.nn.parallel.DistributedDataParallel
    Cost: every gradient once per step. Check: distlab check 3.10, 3.11, 3.23
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        bucket_size_mib: float = 25.0,
        find_unused_parameters: bool = False,
        comm_hook: CommHook | None = None,
    ) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook or start_all_reduce
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("no parameter of the module needs a gradient")
        if not bucket_size_mib > 0:
            raise ValueError(f"bucket_size_mib is {bucket_size_mib}: more than 0")
        for tensor in (*module.parameters(), *module.buffers()):
            comm.broadcast(tensor.data, 0)
        shares = assign_buckets(self.trainable, int(bucket_size_mib * 2**20))
        self.buckets = [Bucket(share) for share in shares]
        self.bucket_of = {p: b for b in self.buckets for p in b.parameters}
        self.num_launched = 0  # buckets whose transfer has begun, in this backward()
        self.syncs = True  # False under no_sync()
        self.active = list(range(comm.world_size))  # who has a batch in this step
        self.arrived: set[Tensor] = set()  # whose gradient is ready, in this backward()
        self.unused: list[Tensor] = []  # without a gradient in the next backward()
        self.news: tuple[Tensor, Work] | None = None
        self.watch()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module makes of them."""
        outputs = self.module(*inputs, **named)
        if self.find_unused_parameters and self.syncs and torch.is_grad_enabled():
            self.unused = self.find_unused(outputs)
        return outputs

    def watch(self) -> None:
        """Have `on_gradient` called with each parameter whose .grad is ready."""
        # TODO(distributed_data_parallel.hooks)
        # of self.trainable; Tensor.register_post_accumulate_grad_hook is what calls
        raise NotImplementedError("distributed_data_parallel.hooks")

    def on_gradient(self, parameter: Tensor) -> None:
        """In backward(): parameter.grad now has all that this backward() adds to it."""
        if not self.syncs:
            return
        if not self.arrived:  # the first one: backward() has only just begun
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_of_backward)
            if self.find_unused_parameters:
                self.news = self.tell_ranks(has_batch=True)
                for other in self.unused:
                    self.without_gradient(other)
        self.arrived.add(parameter)
        self.ready(parameter)

    def ready(self, parameter: Tensor) -> None:
        """Count it; begin the transfer of every bucket whose turn has come."""
        # TODO(distributed_data_parallel.hooks)
        # self.bucket_of[parameter] has one more gradient that is ready. Which buckets
        # can leave now, and in which order? pack, then self.comm_hook(comm, flat)
        raise NotImplementedError("distributed_data_parallel.hooks")

    def end_of_backward(self) -> None:
        """Autograd calls it once, before backward() returns."""
        absent = [p for p in self.trainable if p not in self.arrived]
        self.arrived.clear()
        if absent:
            names = [k for k, p in self.module.named_parameters() if p is absent[0]]
            raise RuntimeError(
                f"{len(absent)} parameters, such as {names[0]}, got no gradient in "
                "this backward(): find_unused_parameters=True is for that"
            )
        self.complete()

    def complete(self) -> None:
        """All transfers have begun: hear who has what, and finish."""
        nobodys: list[Tensor] = []
        if self.news:
            told, work = self.news
            work.wait()
            n, self.news = self.comm.world_size, None
            self.active = [rank for rank in range(n) if told[rank]]
            counts = told[n:].tolist()
            pairs = zip(self.trainable, counts, strict=True)
            nobodys = [parameter for parameter, count in pairs if not count]
        self.finish()
        for parameter in nobodys:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for every bucket; .grad becomes the mean; ready for the next step.

        The mean is over the ranks in self.active: all of them, but for 3.23. Buffers
        become those of the first of them.
        """
        # TODO(distributed_data_parallel.finish)
        # what must be as it was before, so that the next backward() finds it so?
        raise NotImplementedError("distributed_data_parallel.finish")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay at home: backward() in here only adds to .grad."""
        # TODO(distributed_data_parallel.finish)
        # on_gradient looks at self.syncs; what if an error leaves the block?
        raise NotImplementedError("distributed_data_parallel.finish")

    def find_unused(self, outputs: Any) -> list[Tensor]:
        """The trainable parameters that backward() from these outputs cannot reach."""
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        roots = [get_gradient_edge(t).node for t in tensors if t.requires_grad]
        # TODO(distributed_data_parallel.unused)
        # autograd's graph: node.next_functions are pairs (node or None, number);
        # where it ends in a parameter, that is node.variable
        raise NotImplementedError("distributed_data_parallel.unused")

    def without_gradient(self, parameter: Tensor) -> None:
        """In backward(): `parameter` gets no gradient in it, but its bucket must go."""
        # TODO(distributed_data_parallel.unused)
        # what does this rank have to add to the sum? .grad may be of a microbatch
        # under no_sync(), or None
        raise NotImplementedError("distributed_data_parallel.unused")

    def tell_ranks(self, has_batch: bool) -> tuple[Tensor, Work]:
        """Collective: begin to count who has a batch, and a gradient for what.

        The sum has a number for each rank, and then one for each trainable parameter.
        """
        comm, unused = self.comm, set(self.unused)
        mine = [rank == comm.rank for rank in range(comm.world_size)]
        mine += [p not in unused or p.grad is not None for p in self.trainable]
        told = torch.tensor(mine, dtype=torch.int32, device=comm.device) * has_batch
        return told, start_all_reduce(comm, told)

    def join(self) -> Iterator[None]:
        """Out of batches: take part in the steps of those that are not, one by one.

        `for _ in ddp.join(): optimizer.step()` after the last batch, on every rank: it
        ends, on all ranks at once, when nobody has a batch any more.
        """
        if not self.find_unused_parameters:
            raise ValueError("join() needs find_unused_parameters=True")
        # TODO(distributed_data_parallel.unused)
        # a step of theirs: tell_ranks, then every bucket, then complete()
        # does finish() divide by the ranks that have a batch?
        raise NotImplementedError("distributed_data_parallel.unused")


def train(rank: int, world_size: int, folder: str) -> None:
    """One rank of the comparison: the same steps with yours, and with torch's."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(512, 1)).double()
    yours, torchs = [
        DistributedDataParallel(
            copy.deepcopy(model), TorchComm.from_default(), bucket_size_mib=4
        ),
        nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4),
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (yours, torchs)]
    torch.manual_seed(rank)
    inputs = torch.randn(64, 512, dtype=torch.float64)
    if rank == 0:
        print("step   yours: loss, ms              torch's: loss, ms")
    for step in range(8):
        row = []
        for ddp, optimizer in zip((yours, torchs), optimizers, strict=True):
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


if __name__ == "__main__":
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with tempfile.TemporaryDirectory() as made:
        mp.spawn(train, (2, made), 2)  # type: ignore[attr-defined,no-untyped-call]
