"""Sharded training (ZeRO): what every rank has whole is cut into a shard per rank.

Guide: phase3_multi_node/guide/sharded_optimizer.md.
Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); stage 3: FSDP (arXiv 2304.11277).
Symbols: n = comm.world_size; N trained elements; a shard is chunk r of n equal ones.
Cost: `sent` is per rank and step, in units of (n - 1) / n · N; the state is Adam's.

    stage   weights   gradients   state    sent
      0     N         N           2N       2   all_reduce
      1     N         N           2N / n   3   all_reduce, all_gather
      2     N         N / n       2N / n   2   reduce_scatter, all_gather
      3     N / n     N / n       2N / n   3   all_gather twice, reduce_scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm, Work

Group = dict[str, Any]  # `params` and how to optimize them, as torch takes it
Maker = Callable[[list[Group]], torch.optim.Optimizer]  # torch.optim.AdamW, for one
Piece = tuple[int, int, int]  # parameter number, its first element, the one after
State = dict[str, dict[str, Any]]  # by a parameter's name: what is known of a piece


def plan(sizes: Sequence[int], world_size: int) -> list[list[Piece]]:
    """Who owns which element: for each rank the pieces of its shard, in order.

    Parameters of these sizes lie end to end in one vector, with padding at its end
    until world_size divides it. Rank r's shard is chunk r of it; padding is nobody's.
    A piece (2, 5, 8) is elements 5, 6 and 7 of parameter 2, laid out flat.

    C1 every element is in one shard   C2 rank r's shard is chunk r, no piece is empty
    In torch.distributed: FSDP's FlatParameter does this; FSDP2 cuts each by its rows
    Example: sizes 3, 4 on 2 ranks → [(0, 0, 3), (1, 0, 1)] and [(1, 1, 4)]
    Cost: nothing is sent. Check: distlab check 3.12
    """
    # TODO(sharded_optimizer.plan)
    # where does each parameter begin in the vector, and where does each chunk?
    raise NotImplementedError("sharded_optimizer.plan")


def bytes_per_rank(
    size: int, world_size: int, stage: int, per_element: Sequence[int] = (4, 4, 8)
) -> int:
    """What a rank holds of `size` elements at a stage, 0 to 3, of ZeRO, with padding.

    `per_element` are bytes of weight, gradient and state: here float32 and Adam.
    C3 stage 1 shares out the state, stage 2 the gradients too, stage 3 all
    Example: 1,000,000,000 elements on 8 ranks → 16, 9, 5.5 and 2 · 10⁹ bytes
    """
    # TODO(sharded_optimizer.plan)
    # each of the three is there whole, or as a shard
    raise NotImplementedError("sharded_optimizer.plan")


class Bucket:
    """Some parameters of one group: views of one vector, `flat`, padded as in plan().

    `shard` is this rank's chunk as a parameter of its own, in the same memory; `pieces`
    says whose elements these are.
    """

    def __init__(
        self, comm: Comm, group: Group, named: dict[str, nn.Parameter]
    ) -> None:
        self.group, self.names = group, list(named)
        self.parameters = list(named.values())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.pieces = plan(self.sizes, comm.world_size)[comm.rank]
        length = -(-sum(self.sizes) // comm.world_size) * comm.world_size
        self.flat = _end_to_end([p.detach() for p in self.parameters], length)
        views = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.shard = nn.Parameter(self.flat.chunk(comm.world_size)[comm.rank])
        self.arriving: list[Work] = []  # what prefetch() has started

    def take_gradients(self) -> Tensor:
        """All gradients in a vector like `flat`, zeros for none; each .grad is None."""
        gradients = []
        for p in self.parameters:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        return _end_to_end(gradients, self.flat.numel())

    def allocate(self) -> None:
        """Give `flat` its memory again; what is in there is not defined."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)

    def release(self) -> None:
        """Free the memory of `flat`, under all views: to read one then can crash."""
        self.flat.untyped_storage().resize_(0)


class Stage1:
    """Every rank optimizes its shard of the weights, and hands the result round.

    Given: equal models on all ranks, equal shares of the batch, a loss that is a mean.
    Each trained parameter is in one child of the model, a layer, and in one group.
    A step is loss.backward(), once or several times, then the methods reduce_gradients,
    clip if wanted, step, zero_grad; the first three are collective.

    C1 the weights are those of one process, each group with its own settings
    C2 a rank has state for its shards only   C3 clip: with the whole gradient's norm
    C4 state_dict: what this rank has, by name; any number of ranks goes on with it
    In torch.distributed: ZeroRedundancyOptimizer; it gives away whole parameters
    Cost: an all_reduce and an all_gather of N elements. Check: distlab check 3.13
    """

    def __init__(
        self, comm: Comm, model: nn.Module, groups: list[Group], make_optimizer: Maker
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
        found = [p for bucket in self.buckets for p in bucket.parameters]
        trained = {p for p in model.parameters() if p.requires_grad}
        if len(found) != len(trained) or {*found} != trained:
            raise ValueError("a trained parameter must be in one layer and one group")
        self.optimizer = make_optimizer(self.shard_groups())

    def shard_groups(self) -> list[Group]:
        """The groups as this rank's optimizer gets them: with shards for parameters."""
        # TODO(sharded_optimizer.stage1)
        # each of self.buckets belongs to one of self.groups: bucket.group
        raise NotImplementedError("sharded_optimizer.stage1")

    def reduce_gradients(self) -> None:
        """Give every shard its part of the mean gradient; what it had is gone."""
        # TODO(sharded_optimizer.stage1)
        # the whole gradient of a bucket: bucket.take_gradients()
        raise NotImplementedError("sharded_optimizer.stage1")

    def clip(self, max_norm: float) -> float:
        """Shorten the whole gradient to max_norm if it is longer; its norm before."""
        # TODO(sharded_optimizer.stage1)
        # each rank has a part of every gradient: what can be summed over the ranks?
        raise NotImplementedError("sharded_optimizer.stage1")

    def step(self) -> None:
        """Optimize this rank's shards; then every rank has all the new weights."""
        # TODO(sharded_optimizer.stage1)
        # a shard is a part of flat; the other parts are new on other ranks
        raise NotImplementedError("sharded_optimizer.stage1")

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            for parameter in (bucket.shard, *bucket.parameters):
                parameter.grad = None

    def state_dict(self) -> State:
        """By name, this rank's piece: {"start": 3, "stop": 5, "exp_avg": of 2, …}."""
        # TODO(sharded_optimizer.stage1)
        # self.optimizer.state[shard] is what torch keeps for a shard, a dict: what has
        # a number per element is cut into bucket.pieces, the rest is put into each
        raise NotImplementedError("sharded_optimizer.stage1")

    def load_state_dict(self, states: Sequence[State]) -> None:
        """Go on from the `state_dict()` of all ranks of a run, of any number."""
        for bucket in self.buckets:
            state, parts = self.optimizer.state[bucket.shard], dict[str, list[Tensor]]()
            for which, start, stop in bucket.pieces:
                name = bucket.names[which]
                saved = [one[name] for one in states if name in one]
                saved.sort(key=lambda piece: int(piece["start"]))
                if sum(p["stop"] - p["start"] for p in saved) != bucket.sizes[which]:
                    raise ValueError(f"{name} is not whole in these states")
                for key, value in saved[0].items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        whole = torch.cat([piece[key] for piece in saved])
                        parts.setdefault(key, []).append(whole[start:stop])
                    elif key not in ("start", "stop"):
                        state[key] = deepcopy(value)
            for key, own in parts.items():
                state[key] = _end_to_end(own, bucket.shard.numel())


class Stage2(Stage1):
    """As stage 1, but whole gradients are there for a moment only, within backward().

    `reduce_bucket` is called in backward(), when all gradients of a bucket are there,
    from the last bucket to the first on every rank; else by reduce_gradients().

    C1 the weights are those of one process; gradients of several backward() add up
    C2 sends of the gradients what a reduce_scatter sends, half of an all_reduce
    C3 after backward() a rank has its shards' gradients only
    In torch.distributed: fully_shard(model, reshard_after_forward=False)
    Cost: a reduce_scatter per backward(), an all_gather. Check: distlab check 3.16
    """

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self._begin()
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def _begin(self) -> None:
        self.unreduced = list(self.buckets)  # in this backward()
        self.waiting = {bucket: set(bucket.parameters) for bucket in self.buckets}

    def _arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if not self.unreduced:  # another backward() begins
            self._begin()
        self.waiting[bucket].discard(parameter)
        while self.unreduced and not self.waiting[self.unreduced[-1]]:
            self.reduce_bucket(self.unreduced.pop())

    def reduce_gradients(self) -> None:
        """Reduce the buckets that backward() has not reached, if there are any."""
        while self.unreduced:
            self.reduce_bucket(self.unreduced.pop())
        self._begin()

    def reduce_bucket(self, bucket: Bucket) -> None:
        """Add the mean of the ranks' gradients to this rank's: bucket.shard.grad."""
        # TODO(sharded_optimizer.stage2)
        # of the mean gradient this rank needs its own chunk
        raise NotImplementedError("sharded_optimizer.stage2")


class Stage3(Stage2):
    """As stage 2, but a layer's weights are whole only while it computes.

    3.21 C1 the outputs are those of the whole model   C3 one all_gather of each layer
         C2 a rank holds its shards, and while a layer computes, that layer
    3.22 C1 the weights are one process's   C3 one all_gather more, a reduce_scatter
         C2 never more weights than the shards and a layer, or two with prefetch
         C4 with prefetch the next layer's weights travel while one computes
    In torch.distributed: fully_shard(layer) for each layer, then fully_shard(model)
    Cost: two all_gather and a reduce_scatter. Check: distlab check 3.21, 3.22
    """

    is_prefetching = False

    def __init__(self, comm: Comm, model: nn.Module, *values: Any) -> None:
        super().__init__(comm, model, *values)
        for bucket in self.buckets:
            self.cut(bucket)
        for number, layer in enumerate(model.children()):
            self.watch_forward(number, layer)
            self.watch_backward(number, layer)

    def enter(self, number: int, following: int, *_: Any) -> None:
        """Layer `number` is about to compute, and then `following`, if it exists."""
        for bucket in self.layers[number]:
            while bucket.arriving:
                bucket.arriving.pop().wait()
            if not bucket.flat.untyped_storage().nbytes():
                self.gather(bucket)
        if self.is_prefetching and 0 <= following < len(self.layers):
            for bucket in self.layers[following]:
                if not bucket.flat.untyped_storage().nbytes():
                    bucket.arriving = self.prefetch(bucket)

    def leave(self, number: int, *_: Any) -> None:
        """Layer `number` has computed: free its weights; the shards stay."""
        for bucket in self.layers[number]:
            bucket.release()

    def cut(self, bucket: Bucket) -> None:
        """Keep this rank's shard of the weights, and free the rest."""
        # TODO(sharded_optimizer.stage3_forward)
        # until now the shard is a part of flat; the optimizer has this very parameter
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def gather(self, bucket: Bucket) -> None:
        """Make the bucket's weights whole."""
        # TODO(sharded_optimizer.stage3_forward)
        # the parameters are views of flat: what is in flat is in them
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def watch_forward(self, number: int, layer: nn.Module) -> None:
        """From now on the layer's weights are whole while it computes, not longer."""
        # TODO(sharded_optimizer.stage3_forward)
        # layer.register_forward_pre_hook(f): before it computes, f(layer, …);
        # layer.register_forward_hook(f): after it. enter and leave ignore the …
        raise NotImplementedError("sharded_optimizer.stage3_forward")

    def watch_backward(self, number: int, layer: nn.Module) -> None:
        """From now on they are whole in its backward() as well."""

        # TODO(sharded_optimizer.stage3_backward)
        # output.register_hook(f), of what a layer gives: f(gradient), in backward(),
        # as soon as it is known; an output may have no gradient
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def reduce_bucket(self, bucket: Bucket) -> None:
        """As in stage 2; the layer has had its backward()."""
        # TODO(sharded_optimizer.stage3_backward)
        # stage 2 is super().reduce_bucket(bucket)
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def prefetch(self, bucket: Bucket) -> list[Work]:
        """Start to make the bucket's weights whole; what has to be waited for."""
        # TODO(sharded_optimizer.stage3_backward)
        # self.comm.isend and irecv, with every other rank; and the own shard?
        # chunk r of flat is bucket.flat.chunk(self.comm.world_size)[r]
        raise NotImplementedError("sharded_optimizer.stage3_backward")

    def step(self) -> None:
        """Optimize this rank's shards; nobody needs the others' yet."""
        self.optimizer.step()


def _end_to_end(tensors: Sequence[Tensor], length: int) -> Tensor:
    """A copy of all of them in one vector, with zeros at its end."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    rest = length - sum(part.numel() for part in flat)
    return torch.cat([*flat, flat[0].new_zeros(rest)])
