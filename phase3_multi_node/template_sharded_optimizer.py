"""ZeRO: optimizer state, gradients and parameters sharded over data-parallel ranks.

Guide: phase3_multi_node/guide/sharded_optimizer.md.
Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); stage 3: FSDP (arXiv 2304.11277).
Symbols: n = comm.world_size; N trained elements; a shard is chunk r of n equal ones.
Cost: `sent` is per rank and step, in units of (n - 1) / n · N; the state is Adam's.

    stage   weights   gradients   state    sent
      0     N         N           2N       2   all_reduce
      1     N         N           2N / n   2   reduce_scatter, all_gather
      2     N         N / n       2N / n   2   reduce_scatter, all_gather
      3     N / n     N / n       2N / n   3   all_gather twice, reduce_scatter

comm.reduce_scatter(output, input) sets output to this rank's chunk of the sum of all
inputs; comm.all_gather(output, input) sets output to all inputs, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import Comm, Work

ParamGroup = dict[str, Any]  # `params` and their settings, as torch.optim takes them
OptimizerFactory = Callable[[list[ParamGroup]], torch.optim.Optimizer]  # e.g. AdamW
State = dict[str, dict[str, Any]]  # by parameter name: a shard range and its state


class ShardRange(NamedTuple):
    """Elements start to stop - 1 of one flattened parameter."""

    parameter: int
    start: int
    stop: int


def plan(sizes: Sequence[int], world_size: int) -> list[list[ShardRange]]:
    """Which rank owns which elements: for each rank the ranges of its shard, in order.

    Parameters of these sizes lie end to end in one vector, padded at its end to a
    multiple of world_size. Rank r's shard is chunk r of it. Padding has no range.
    ShardRange(2, 5, 8), or the tuple (2, 5, 8): elements 5, 6, 7 of parameter 2.

    C1 every element is in one shard   C2 rank r's shard is chunk r, no range is empty
    In torch.distributed: FSDP1's FlatParameter; FSDP2 shards each parameter by rows
    Example: sizes 3, 4 on 2 ranks → [(0, 0, 3), (1, 0, 1)] and [(1, 1, 4)]
    Cost: no message. Check: distlab check 3.12
    """
    # TODO(sharded_optimizer.plan)
    # where does each parameter begin in the vector, and where does each chunk?
    raise NotImplementedError("sharded_optimizer.plan")


def bytes_per_rank(
    size: int, world_size: int, stage: int, per_element: Sequence[int] = (4, 4, 8)
) -> int:
    """Bytes that a rank holds of `size` elements at ZeRO stage 0 to 3.

    `per_element`: bytes of weight, gradient and state, here float32 and Adam. What is
    full has `size` elements; what is sharded has ⌈size / world_size⌉, with padding.
    C3 stage 1 shards the state, stage 2 also the gradients, stage 3 also the weights
    Example: 1,000,000,000 elements on 8 ranks → 16, 9, 5.5 and 2 · 10⁹ bytes
    """
    # TODO(sharded_optimizer.plan)
    # each of the three is either full or sharded
    raise NotImplementedError("sharded_optimizer.plan")


class Bucket:
    """Some parameters of one group: views of one vector, `flat`, padded as in plan().

    `shard` is this rank's chunk of `flat` as a parameter, in the same memory;
    `shard_ranges` lists the elements in it, one range after another.
    """

    def __init__(
        self, comm: Comm, group: ParamGroup, named: dict[str, nn.Parameter]
    ) -> None:
        self.group, self.names = group, list(named)
        self.parameters = list(named.values())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.shard_ranges = plan(self.sizes, comm.world_size)[comm.rank]
        length = -(-sum(self.sizes) // comm.world_size) * comm.world_size
        self.flat = _flatten([p.detach() for p in self.parameters], length)
        views = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.shard = nn.Parameter(self.flat.chunk(comm.world_size)[comm.rank])
        self.in_flight: list[Work] = []  # what prefetch() has started

    def take_gradients(self) -> Tensor:
        """All gradients in a vector like `flat`, zeros for none; each .grad is None."""
        gradients = []
        for p in self.parameters:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        return _flatten(gradients, self.flat.numel())

    def allocate(self) -> None:
        """Give `flat` memory again; its values are undefined."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)

    def free(self) -> None:
        """Free the memory of `flat` and all its views: reading one can crash."""
        self.flat.untyped_storage().resize_(0)


class ShardedOptimizer:
    """ZeRO stage 1: each rank has the optimizer state of its shards only.

    Given: equal models on all ranks, equal batch sizes, a loss that is a mean.
    Each trained parameter is in one child of the model (a layer) and in one group.
    A step: loss.backward(), once or several times; reduce_gradients; clip if wanted;
    step; zero_grad. reduce_gradients, clip and step are collective.

    3.13 C1 the weights are those of a single process, each group with its settings
         C2 a rank has state for its shards only
         C3 a step sends no more than plain data parallelism
    3.14 C1 clip returns the norm of the full gradient before clipping, on every rank
         C2 a longer gradient is scaled to max_norm, a shorter one is not changed
    3.15 C1 state_dict: each rank's ranges by parameter name   C2 with all their state:
         any number of ranks can continue
    In torch.distributed: ZeroRedundancyOptimizer; it assigns full parameters to ranks
    Cost: a reduce_scatter and an all_gather of N elements per step, for clip an
    all_reduce of one. Check: distlab check 3.13, 3.14, 3.15
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        groups: list[ParamGroup],
        optimizer_factory: OptimizerFactory,
    ) -> None:
        self.comm = comm
        self.groups = [{**group, "params": list(group["params"])} for group in groups]
        group_of = {p: i for i, g in enumerate(self.groups) for p in g["params"]}
        self.layers: list[list[Bucket]] = []  # of each child of the model
        for child, layer in model.named_children():
            kinds: dict[Any, dict[str, nn.Parameter]] = {}
            for name, p in layer.named_parameters(prefix=child):
                if p.requires_grad and p in group_of:
                    kinds.setdefault((group_of[p], p.dtype), {})[name] = p
            own = [Bucket(comm, self.groups[i], kind) for (i, _), kind in kinds.items()]
            self.layers.append(own)
        self.buckets = [bucket for layer in self.layers for bucket in layer]
        bucketed = [p for bucket in self.buckets for p in bucket.parameters]
        trained = {p for p in model.parameters() if p.requires_grad}
        if len(bucketed) != len(trained) or {*bucketed} != trained:
            raise ValueError("a trained parameter must be in one layer and one group")
        self.optimizer = optimizer_factory(self.shard_groups())

    def shard_groups(self) -> list[ParamGroup]:
        """The parameter groups for this rank's optimizer: its shards as `params`."""
        # TODO(sharded_optimizer.stage1)
        # each of self.buckets belongs to one of self.groups: bucket.group
        raise NotImplementedError("sharded_optimizer.stage1")

    def reduce_gradients(self) -> None:
        """Set each bucket.shard.grad to this rank's chunk of the mean gradient."""
        # TODO(sharded_optimizer.stage1)
        # bucket.take_gradients(): the full local gradient; which part is needed here?
        raise NotImplementedError("sharded_optimizer.stage1")

    def step(self) -> None:
        """Update this rank's shards; then gather the new weights of all ranks."""
        # TODO(sharded_optimizer.stage1)
        # bucket.shard is one chunk of bucket.flat; other ranks update the others
        raise NotImplementedError("sharded_optimizer.stage1")

    def clip(self, max_norm: float) -> float:
        """Scale the full gradient to max_norm if it is longer; its norm before that.

        Called after reduce_gradients, when every bucket.shard has its gradient. It may
        be zero, and its norm may be infinite.
        """
        # TODO(sharded_optimizer.clip)
        # each rank has a part of every gradient: what can be summed over the ranks?
        raise NotImplementedError("sharded_optimizer.clip")

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for bucket in self.buckets:
            for parameter in (bucket.shard, *bucket.parameters):
                parameter.grad = None

    def state_dict(self) -> State:
        """This rank's state by name: {"0.weight": {"start": 3, "stop": 5, …}, …}.

        With start and stop: each entry that the optimizer keeps for the shard, under
        its own key. A tensor with one element per weight is cut to the range.
        """
        # TODO(sharded_optimizer.state)
        # self.optimizer.state[bucket.shard] is what torch keeps for a shard, a dict:
        # cut its vectors by bucket.shard_ranges, copy its scalars into each entry
        raise NotImplementedError("sharded_optimizer.state")

    def load_state_dict(self, states: Sequence[State]) -> None:
        """Continue from the `state_dict()` of all ranks of a run, of any world size."""
        for bucket in self.buckets:
            state, parts = self.optimizer.state[bucket.shard], dict[str, list[Tensor]]()
            for number, start, stop in bucket.shard_ranges:
                name = bucket.names[number]
                saved = [one[name] for one in states if name in one]
                saved.sort(key=lambda entry: int(entry["start"]))
                if sum(s["stop"] - s["start"] for s in saved) != bucket.sizes[number]:
                    raise ValueError(f"{name} is incomplete in these states")
                for key, value in saved[0].items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        full = torch.cat([entry[key] for entry in saved])
                        parts.setdefault(key, []).append(full[start:stop])
                    elif key not in ("start", "stop"):
                        state[key] = deepcopy(value)
            for key, own in parts.items():
                state[key] = _flatten(own, bucket.shard.numel())


class ShardedGradients(ShardedOptimizer):
    """ZeRO stage 2: full gradients exist for one bucket at a time, within backward().

    backward() calls `reduce_bucket` when all gradients of a bucket are ready, from the
    last bucket to the first on every rank; reduce_gradients() calls it for the rest.

    C1 the weights are those of a single process; several backward() accumulate
    C2 each backward() sends one reduce_scatter, no more
    C3 after backward() a rank has its shards' gradients only
    In torch.distributed: nearest is fully_shard(…, reshard_after_forward=False); that
        shards the weights, too, between a backward and the next forward
    Cost: a reduce_scatter per backward(), an all_gather. Check: distlab check 3.16
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reset()
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(partial(self._mark_ready, bucket))

    def _reset(self) -> None:
        self.unreduced = list(self.buckets)  # in this backward()
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}

    def _mark_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if not self.unreduced:  # another backward() begins
            self._reset()
        self.missing[bucket].discard(parameter)
        while self.unreduced and not self.missing[self.unreduced[-1]]:
            self.reduce_bucket(self.unreduced.pop())

    def reduce_gradients(self) -> None:
        """Reduce the buckets that backward() has not reached, if there are any."""
        while self.unreduced:
            self.reduce_bucket(self.unreduced.pop())
        self._reset()

    def reduce_bucket(self, bucket: Bucket) -> None:
        """Add this rank's chunk of the bucket's mean gradient to bucket.shard.grad.

        When it returns, no full gradient of the bucket is left in memory.
        """
        # TODO(sharded_optimizer.stage2)
        # an earlier backward() of the same step may have left a gradient
        raise NotImplementedError("sharded_optimizer.stage2")


class FullySharded(ShardedGradients):
    """ZeRO stage 3: a layer's weights are unsharded only while it computes.

    3.21 C1 the outputs are those of the unsharded model
         C2 a rank holds its shards, and the layer that computes
         C3 a forward sends one all_gather of each layer
    3.22 C1 the weights are those of a single process
         C2 at most one layer is unsharded, or two with prefetch
         C3 a step sends two all_gather of each layer and a reduce_scatter
         C4 with prefetch, the next layer's weights are in flight while one computes
    In torch.distributed: fully_shard(layer) for each layer, then fully_shard(model)
    Cost: two all_gather and a reduce_scatter. Check: distlab check 3.21, 3.22
    """

    is_prefetching = False

    def __init__(self, comm: Comm, model: nn.Module, *arguments: Any) -> None:
        super().__init__(comm, model, *arguments)
        for bucket in self.buckets:
            self.shard_bucket(bucket)
        for number, layer in enumerate(model.children()):
            self.hook_forward(number, layer)
            self.hook_backward(number, layer)

    def unshard_layer(self, number: int, following: int, *_: Any) -> None:
        """Before layer `number` computes; `following` computes next, if it exists."""
        for bucket in self.layers[number]:
            while bucket.in_flight:
                bucket.in_flight.pop().wait()
            if not bucket.flat.untyped_storage().nbytes():
                self.unshard_bucket(bucket)
        if self.is_prefetching and 0 <= following < len(self.layers):
            for bucket in self.layers[following]:
                if not bucket.flat.untyped_storage().nbytes():
                    bucket.in_flight = self.prefetch(bucket)

    def reshard_layer(self, number: int, *_: Any) -> None:
        """After layer `number` has computed: free its full weights, keep the shards."""
        for bucket in self.layers[number]:
            bucket.free()

    def shard_bucket(self, bucket: Bucket) -> None:
        """Give bucket.shard its own memory, then free the full weights."""
        # TODO(sharded_optimizer.stage3_forward)
        # so far the shard is a view of flat; the optimizer has this very parameter
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def unshard_bucket(self, bucket: Bucket) -> None:
        """Fill bucket.flat with the full weights, from the shards of all ranks.

        The bucket's full weights are in memory once, also while this goes on.
        """
        # TODO(sharded_optimizer.stage3_forward)
        # the parameters are views of flat: they see what is written into flat
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def hook_forward(self, number: int, layer: nn.Module) -> None:
        """Register forward hooks: unshard the layer before it computes, reshard after.

        The layer after it in forward is number + 1.
        """
        # TODO(sharded_optimizer.stage3_forward)
        # layer.register_forward_pre_hook(f) calls f(layer, …) before forward,
        # register_forward_hook(f) after it; the two methods ignore the …
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def hook_backward(self, number: int, layer: nn.Module) -> None:
        """Register hooks that unshard the layer just before its backward."""

        # TODO(sharded_optimizer.stage3_backward)
        # output.register_hook(f), on a layer's output: backward() calls f(gradient)
        # as soon as that gradient is known; an output may require no gradient
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def reduce_bucket(self, bucket: Bucket) -> None:
        """As in stage 2; the bucket's layer is done: free its full weights, too."""
        # TODO(sharded_optimizer.stage3_backward)
        # stage 2 is super().reduce_bucket(bucket)
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def prefetch(self, bucket: Bucket) -> list[Work]:
        """Start to unshard the bucket, without waiting; the work to wait for."""
        # TODO(sharded_optimizer.stage3_backward)
        # self.comm.isend and irecv, with every other rank; and the own shard?
        # chunk r of flat is bucket.flat.chunk(self.comm.world_size)[r]
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def step(self) -> None:
        """Update this rank's shards; the next forward gathers the new weights."""
        self.optimizer.step()


STAGES = {1: ShardedOptimizer, 2: ShardedGradients, 3: FullySharded}


def _flatten(tensors: Sequence[Tensor], length: int) -> Tensor:
    """A copy of all tensors in one vector of this length, zeros at its end."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    rest = length - sum(part.numel() for part in flat)
    return torch.cat([*flat, flat[0].new_zeros(rest)])
