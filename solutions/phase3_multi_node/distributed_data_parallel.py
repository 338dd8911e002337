"""DistributedDataParallel: all-reduce gradients while backward() is still computing.

Guide: phase3_multi_node/guide/distributed_data_parallel.md.
Source: S. Li et al., PyTorch Distributed (arXiv 2006.15704), sections 3.2 and 4.2.
Symbols: n = comm.world_size; S = the bytes of all gradients.
Cost: an all_reduce of S, most of it during backward(); S bytes of memory for buckets.

    backward   layer 4 │ layer 3 │ layer 2 │ layer 1 │
    bucket 0                     └─▶ all_reduce of 4, 3 ▒▒▒▒▒     wait, divide, unpack
    bucket 1                                         └─▶ of 2, 1 ▒▒▒▒▒▒▒▒

backward() computes the last layer's gradient first, so you can send it while those of
earlier layers are computed. One message per parameter costs too much latency, so use
buckets. `python` with this file's name trains your class beside torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from distlab.comm import Comm, Work
from distlab.given.distributed_data_parallel import (
    DataParallelModule,
    compare_with_torch,
    flat_for,
    tensors_in,
)


def assign_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Group tensors into buckets; their gradients come from the last to the first.

    C1 Each tensor belongs to exactly one bucket, and the buckets are filled from the
       last tensor to the first. A bucket is complete once it has its lowest-numbered
       tensor, and the buckets are listed in the order in which they become complete.
    C2 A bucket holds at most bucket_bytes, unless it consists of a single tensor that
       is larger. A bucket ends only where the next tensor would no longer fit into it.
    C3 All tensors in a bucket have the same dtype and are on the same device.
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

    Given: `flat` has one dimension, as many elements, the same device and dtype, except
    that it is float32 for float16, where the sum of two gradients may not fit.
    A tensor may have any shape, even (), and may be non-contiguous.
    C4 `unpack` writes the values that `pack` has copied into `flat` back to the
       tensors, in place.
    """
    ### BEGIN SOLUTION distributed_data_parallel.buckets
    #| which shape has `flat`, and which shape has a tensor?
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    ### END SOLUTION


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Undo `pack`: copy the elements of `flat` back into the tensors, in place."""
    ### BEGIN SOLUTION distributed_data_parallel.buckets
    #| the reverse of pack
    slices = flat.split([tensor.numel() for tensor in tensors])
    for tensor, values in zip(tensors, slices, strict=True):
        tensor.copy_(values.view(tensor.shape))
    ### END SOLUTION


class Bucket:
    """Parameters whose gradients travel in one message, as a copy in `flat`."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.flat = flat_for(parameters)  # (elements of all gradients,)
        self.num_ready = 0  # of their gradients, in this backward()
        self.work: Work | None = None  # the all_reduce, once it has started

    def gradients(self) -> list[Tensor]:
        """Return the .grad of its parameters, in their order."""
        ready = [p.grad for p in self.parameters if p.grad is not None]
        if missing := len(self.parameters) - len(ready):
            raise RuntimeError(f"{missing} gradients of a bucket are not ready yet")
        return ready


CommHook = Callable[[Comm, Bucket], Work]


def start_all_reduce(comm: Comm, bucket: Bucket) -> Work:
    """Start to sum `bucket.flat` over the ranks, in place, and return at once.

    The Work's `wait()` may do a part; once it returns, the sum is in `bucket.flat`.
    3.10 C3 No rank waits for a message while backward() is still computing.
    """
    ### BEGIN SOLUTION distributed_data_parallel.hooks
    #| which argument makes comm.all_reduce non-blocking?
    work = comm.all_reduce(bucket.flat, async_op=True)
    assert work is not None
    return work
    ### END SOLUTION


class DistributedDataParallel(DataParallelModule):
    """Wraps a module so that backward() leaves the mean over the ranks in .grad.

    Collective: every rank constructs it from a module of the same architecture, which
    gets rank 0's parameters and buffers. `comm_hook` replaces `start_all_reduce`. With
    `find_unused_parameters`, the ranks count in each step which of them have a batch,
    and which parameters have a gradient; see 3.23.

    DataParallelModule, which is given, has forward(), and calls finalize_backward()
    before backward() returns. Its field `trainable` has the parameters that require a
    gradient, each once, and `arrived` those whose gradient is ready in this backward().
    `active` lists the ranks with a batch in ascending order, that is all until 3.23.
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
        broadcast_buffers: bool = True,
        comm_hook: CommHook | None = None,
    ) -> None:
        if not bucket_size_mib > 0:
            raise ValueError(f"bucket_size_mib is {bucket_size_mib}, must be positive")
        super().__init__(module, comm, broadcast_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook or start_all_reduce
        groups = assign_buckets(self.trainable, int(bucket_size_mib * 2**20))
        self.buckets = [Bucket(group) for group in groups]
        self.bucket_of = {p: b for b in self.buckets for p in b.parameters}
        self.num_launched = 0  # buckets whose all_reduce has started
        self.watch()

    def watch(self) -> None:
        """Register `on_gradient` as a hook: autograd calls it when a .grad is ready."""
        ### BEGIN SOLUTION distributed_data_parallel.hooks
        #| for self.trainable; see Tensor.register_post_accumulate_grad_hook
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
        ### END SOLUTION

    def on_gradient(self, parameter: Tensor) -> None:
        """Handle a complete parameter.grad during backward()."""
        if not self.syncs:
            return
        if not self.arrived:  # the first gradient of this backward()
            self.expect_end()
            if self.find_unused_parameters:
                self.usage_work = self.all_reduce_usage(has_batch=True)
                for other in self.unused:
                    self.without_gradient(other)
        if parameter in self.arrived:
            self.refuse_second(parameter)
        self.arrived.add(parameter)
        self.mark_ready(parameter)

    def mark_ready(self, parameter: Tensor) -> None:
        """Count the gradient; start the all_reduce of every bucket whose turn it is.

        3.10 C1 A bucket's all_reduce starts as soon as its last gradient is ready. A
                weight that has two names still has only one gradient.
             C2 All ranks start the buckets in the same order, no matter which bucket is
                ready first.
        """
        ### BEGIN SOLUTION distributed_data_parallel.hooks
        #| self.bucket_of[parameter] has one more ready gradient. Which buckets can be
        #| sent now, and in which order? pack, then self.comm_hook(comm, bucket)
        self.bucket_of[parameter].num_ready += 1
        for bucket in self.buckets[self.num_launched :]:
            if bucket.num_ready < len(bucket.parameters):
                break
            pack(bucket.gradients(), bucket.flat)
            bucket.work = self.comm_hook(self.comm, bucket)
            self.num_launched += 1
        ### END SOLUTION

    def finalize_backward(self) -> None:
        """Wait for the buckets, in order; .grad becomes the mean; reset all counters.

        3.11 C1 In each step, once backward() returns, the `.grad` of every parameter in
                self.trainable is the mean over the ranks in self.active. This holds
                even if the `.grad` was None or was zeroed in place.
             C2 By then, every rank also has the shared buffers of the first rank in
                self.active, which is rank 0 unless ranks have left.
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
        for buffer in self.shared_buffers():
            self.comm.broadcast(buffer, self.active[0])
        ### END SOLUTION
        for parameter in unused_everywhere:
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Send nothing, so that backward() in this block only accumulates into .grad.

        3.11 C3 Under no_sync(), nothing is sent and gradients accumulate in `.grad`,
                even after an inner no_sync() block has ended. The first backward()
                after the outermost block sends again, even if the block raised an
                exception.
        """
        ### BEGIN SOLUTION distributed_data_parallel.finish
        #| on_gradient reads self.syncs. What if an error ends the block?
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before
        ### END SOLUTION

    def find_unused(self, outputs: Any) -> list[Tensor]:
        """Find the trainable parameters that backward() from these outputs can't reach.

        3.23 C2 If no rank has a gradient for a parameter, its `.grad` stays None.
        """
        roots = [get_gradient_edge(tensor).node for tensor in tensors_in(outputs)]
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
        """Count a parameter without a gradient, because its bucket must still be sent.

        3.23 C1 If only some ranks have a gradient for a parameter, the other ranks
                contribute zeros. There, the parameter is added to self.arrived and
                counted in the same way as in on_gradient.
        """
        ### BEGIN SOLUTION distributed_data_parallel.unused
        #| which values does this rank add to the sum? .grad may hold the gradient of a
        #| microbatch under no_sync(), or be None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.arrived.add(parameter)
        self.mark_ready(parameter)
        ### END SOLUTION

    def join(self) -> Iterator[None]:
        """Take part in the other ranks' remaining steps after the last batch.

        Every rank runs `for _ in ddp.join(): optimizer.step()` after its last batch.
        Given: all_reduce_usage() returns usage, work; after work.wait() usage[r] is 1
        if rank r has a batch. finalize_backward() reads both, as self.usage_work.
        3.23 C3 The mean is taken over the ranks that have a batch, and the other ranks
                send zeros instead of an old `.grad`. join() ends on all ranks at the
                same time, once no rank has a batch.

        Raises:
            ValueError: find_unused_parameters is False
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


if __name__ == "__main__":
    compare_with_torch(DistributedDataParallel)
