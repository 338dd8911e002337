"""DistributedDataParallel: gradients are all-reduced while backward() still computes.

Guide: phase3_multi_node/guide/distributed_data_parallel.md.
Source: S. Li et al., PyTorch Distributed (arXiv 2006.15704), sections 3.2 and 4.2.
Symbols: n = comm.world_size; S = the bytes of all gradients.
Cost: an all_reduce of S, most of it during backward(); S bytes of memory for buckets.

    backward   layer 4 │ layer 3 │ layer 2 │ layer 1 │
    bucket 0                     └─▶ all_reduce of 4, 3 ▒▒▒▒▒     wait, divide, unpack
    bucket 1                                         └─▶ of 2, 1 ▒▒▒▒▒▒▒▒

backward() computes the last layer's gradient first. So this gradient can be sent while
the gradients of earlier layers are still being computed. One message per parameter
costs too much latency, so gradients are sent in buckets. `python` with the name of
this file trains your class and torch's on the same data.
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
    """Group the tensors into buckets, beginning with the last tensor.

    C1 each tensor is in one bucket; inside a bucket the tensors come in reverse order,
    and so do the last tensors of the buckets, which complete them in backward()
    C2 a bucket has at most bucket_bytes, unless it is a single tensor; the next tensor
    would not fit into it
    C3 all tensors of a bucket have one dtype and one device
    In torch.distributed: DistributedDataParallel does this in its constructor
    Example: 8, 8, 40 and 8 bytes, at most 16 → [8], [40], [8, 8], the last one first
    Cost: none. Check: distlab check 3.9
    """
    ### BEGIN SOLUTION distributed_data_parallel.buckets
    #| when does a bucket end and the next one begin?
    buckets: list[list[Tensor]] = []
    kind, left_bytes = None, 0
    for tensor in reversed(tensors):
        if (tensor.dtype, tensor.device) != kind or tensor.nbytes > left_bytes:
            kind, left_bytes = (tensor.dtype, tensor.device), bucket_bytes
            buckets.append([])
        buckets[-1].append(tensor)
        left_bytes -= tensor.nbytes
    return buckets
    ### END SOLUTION


def pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Fill `flat`, in place, with all elements of the tensors, one after another.

    Given: `flat` has one dimension, as many elements, the same dtype and device. A
    tensor may have any shape, also (), and may be non-contiguous.

    C4 unpack restores the values of every tensor; flat is filled in place
    """
    ### BEGIN SOLUTION distributed_data_parallel.buckets
    #| which shape has `flat`, and which shape has a tensor?
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    ### END SOLUTION


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of `flat` back into the tensors, in place: see `pack`."""
    ### BEGIN SOLUTION distributed_data_parallel.buckets
    #| the reverse of pack
    slices = flat.split([tensor.numel() for tensor in tensors])
    for tensor, values in zip(tensors, slices, strict=True):
        tensor.copy_(values.view(tensor.shape))
    ### END SOLUTION


def start_all_reduce(comm: Comm, flat: Tensor) -> Work:
    """Start to sum `flat` over the ranks, in place, and return at once.

    The `wait()` of the returned Work blocks until the sum is in `flat`.
    """
    ### BEGIN SOLUTION distributed_data_parallel.hooks
    #| which argument makes comm.all_reduce non-blocking?
    work = comm.all_reduce(flat, async_op=True)
    assert work is not None
    return work
    ### END SOLUTION


class Bucket:
    """Parameters whose gradients are sent in one message, `flat`."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_empty(size)
        self.num_ready = 0  # of their gradients, in this backward()
        self.work: Work | None = None  # the all_reduce, once it has started

    def gradients(self) -> list[Tensor]:
        """The .grad of its parameters, in their order."""
        ready = [p.grad for p in self.parameters if p.grad is not None]
        missing = len(self.parameters) - len(ready)
        if missing:
            raise RuntimeError(f"{missing} gradients of a bucket are not ready yet")
        return ready


class DistributedDataParallel(nn.Module):
    """The module; when backward() returns, .grad is the mean over the ranks.

    Collective: every rank constructs it, from a module of the same architecture.
    Parameters and buffers become rank 0's. `comm_hook` replaces `start_all_reduce`.
    With `find_unused_parameters` the ranks count in each step who has a batch and which
    parameters have a gradient: see 3.23.

    3.10 C1 a bucket's all_reduce starts as soon as its last gradient is ready; a weight
            with two names has one gradient
         C2 all ranks start the buckets in the same order, whichever is ready first
         C3 no rank waits for a message while backward() computes
    3.11 C1 when backward() returns, every .grad is the mean over the ranks, in each
            step, also if .grad was None before or was zeroed in place
         C2 buffers are then rank 0's, on every rank
         C3 under no_sync() nothing is sent; .grad accumulates until a backward()
            outside
    3.23 C1 a parameter without a gradient on some ranks counts as zero there
         C2 a parameter without a gradient on all ranks keeps .grad = None
         C3 a rank without batches takes part through join(); the mean is over the ranks
            that have a batch, and all ranks leave join() together
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
            raise ValueError("no parameter of the module requires a gradient")
        if not bucket_size_mib > 0:
            raise ValueError(f"bucket_size_mib is {bucket_size_mib}, must be positive")
        for tensor in (*module.parameters(), *module.buffers()):
            comm.broadcast(tensor.data, 0)
        groups = assign_buckets(self.trainable, int(bucket_size_mib * 2**20))
        self.buckets = [Bucket(group) for group in groups]
        self.bucket_of = {p: b for b in self.buckets for p in b.parameters}
        self.num_launched = 0  # buckets whose all_reduce has started
        self.syncs = True  # False under no_sync()
        self.active = list(range(comm.world_size))  # ranks with a batch, this step
        self.arrived: set[Tensor] = set()  # gradient is ready, in this backward()
        self.unused: list[Tensor] = []  # get no gradient in the next backward()
        self.usage_work: tuple[Tensor, Work] | None = None
        self.watch()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the module."""
        outputs = self.module(*inputs, **named)
        if self.find_unused_parameters and self.syncs and torch.is_grad_enabled():
            self.unused = self.find_unused(outputs)
        return outputs

    def watch(self) -> None:
        """Register `on_gradient` as a hook: autograd calls it when a .grad is ready."""
        ### BEGIN SOLUTION distributed_data_parallel.hooks
        #| for self.trainable; see Tensor.register_post_accumulate_grad_hook
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
        ### END SOLUTION

    def on_gradient(self, parameter: Tensor) -> None:
        """In backward(): parameter.grad is complete."""
        if not self.syncs:
            return
        if not self.arrived:  # the first gradient of this backward()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_of_backward)
            if self.find_unused_parameters:
                self.usage_work = self.all_reduce_usage(has_batch=True)
                for other in self.unused:
                    self.without_gradient(other)
        self.arrived.add(parameter)
        self.mark_ready(parameter)

    def mark_ready(self, parameter: Tensor) -> None:
        """Count the gradient; start the all_reduce of every bucket whose turn it is."""
        ### BEGIN SOLUTION distributed_data_parallel.hooks
        #| self.bucket_of[parameter] has one more ready gradient. Which buckets can be
        #| sent now, and in which order? pack, then self.comm_hook(comm, flat)
        self.bucket_of[parameter].num_ready += 1
        for bucket in self.buckets[self.num_launched :]:
            if bucket.num_ready < len(bucket.parameters):
                break
            pack(bucket.gradients(), bucket.flat)
            bucket.work = self.comm_hook(self.comm, bucket.flat)
            self.num_launched += 1
        ### END SOLUTION

    def end_of_backward(self) -> None:
        """Autograd calls it once, before backward() returns."""
        absent = [p for p in self.trainable if p not in self.arrived]
        self.arrived.clear()
        if absent:
            names = [k for k, p in self.module.named_parameters() if p is absent[0]]
            advice = "find_unused() did not return it"
            if not self.find_unused_parameters:
                advice = "set find_unused_parameters=True"
            raise RuntimeError(
                f"{len(absent)} parameters, such as {names[0]}, got no gradient in "
                f"this backward(): {advice}"
            )
        self.finalize_backward()

    def wait_usage(self) -> list[Tensor]:
        """Set self.active; return the parameters that no rank has a gradient for."""
        if self.usage_work is None:
            return []
        (usage, work), self.usage_work = self.usage_work, None
        work.wait()
        n = self.comm.world_size
        self.active = [rank for rank in range(n) if usage[rank]]
        pairs = zip(self.trainable, usage[n:].tolist(), strict=True)
        return [parameter for parameter, count in pairs if not count]

    def finalize_backward(self) -> None:
        """Wait for every bucket; .grad becomes the mean; reset for the next step.

        The mean is over the ranks in self.active: all ranks, except in 3.23. Buffers
        become those of the first rank in self.active.
        """
        unused_everywhere = self.wait_usage()
        ### BEGIN SOLUTION distributed_data_parallel.finish
        #| which counters must be reset, so that the next backward() can begin?
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.flat /= len(self.active)
            unpack(bucket.flat, bucket.gradients())
            bucket.num_ready, bucket.work = 0, None
        self.num_launched = 0
        for buffer in self.module.buffers():
            self.comm.broadcast(buffer, self.active[0])
        ### END SOLUTION
        for parameter in unused_everywhere:
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Send nothing: backward() in this block only accumulates into .grad."""
        ### BEGIN SOLUTION distributed_data_parallel.finish
        #| on_gradient reads self.syncs. What if an error ends the block?
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before
        ### END SOLUTION

    def find_unused(self, outputs: Any) -> list[Tensor]:
        """The trainable parameters that backward() from these outputs cannot reach."""
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        roots = [get_gradient_edge(t).node for t in tensors if t.requires_grad]
        ### BEGIN SOLUTION distributed_data_parallel.unused
        #| autograd's graph: node.next_functions are pairs (node or None, number); a
        #| node with an attribute `variable` is the end, at that parameter. The graph
        #| may be thousands of nodes deep: Python stops 1,000 calls inside each other
        reached: set[Tensor] = set()
        seen: set[Node] = set()
        while roots:
            node = roots.pop()
            if node not in seen:
                seen.add(node)
                reached |= {node.variable} if hasattr(node, "variable") else set()
                roots += [after for after, _ in node.next_functions if after]
        return [p for p in self.trainable if p not in reached]
        ### END SOLUTION

    def without_gradient(self, parameter: Tensor) -> None:
        """In backward(): `parameter` gets no gradient, but its bucket must be sent."""
        ### BEGIN SOLUTION distributed_data_parallel.unused
        #| which values does this rank add to the sum? .grad may hold the gradient of a
        #| microbatch under no_sync(), or be None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.arrived.add(parameter)
        self.mark_ready(parameter)
        ### END SOLUTION

    def all_reduce_usage(self, has_batch: bool) -> tuple[Tensor, Work]:
        """Collective: start to count the ranks with a batch, and used parameters.

        The sum has one number for each rank, then one for each trainable parameter.
        """
        comm, unused = self.comm, set(self.unused)
        counts = [rank == comm.rank for rank in range(comm.world_size)]
        counts += [p not in unused or p.grad is not None for p in self.trainable]
        usage = torch.tensor(counts, dtype=torch.int32, device=comm.device) * has_batch
        return usage, start_all_reduce(comm, usage)

    def join(self) -> Iterator[None]:
        """After the last batch: take part in the remaining steps of the other ranks.

        `for _ in ddp.join(): optimizer.step()` after the last batch, on every rank. It
        ends on all ranks at once, when no rank has a batch any more.
        """
        if not self.find_unused_parameters:
            raise ValueError("join() needs find_unused_parameters=True")
        ### BEGIN SOLUTION distributed_data_parallel.unused
        #| one step of the other ranks: all_reduce_usage, every bucket, then
        #| finalize_backward(). who divides by the ranks that have a batch?
        while True:
            usage, work = self.usage_work = self.all_reduce_usage(has_batch=False)
            work.wait()
            if not usage[: self.comm.world_size].any():
                break
            for parameter in reversed(self.trainable):
                parameter.grad = torch.zeros_like(parameter)
                self.mark_ready(parameter)
            self.finalize_backward()
            yield
        ### END SOLUTION


def train(rank: int, world_size: int, folder: str) -> None:
    """One rank of the comparison: the same steps with your class and with torch's."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
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
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (2, folder), 2)  # type: ignore[attr-defined,no-untyped-call]
