"""An optimizer that has only shards, but behaves like any torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.sharded_optimizer.backward import Backward, Reducer
from distlab.given.sharded_optimizer.buckets import (
    Bucket,
    ParamGroup,
    Ranges,
    layers_of,
)
from distlab.given.sharded_optimizer.state import (
    Entry,
    entries_for,
    load_bucket,
    load_groups,
    saved_groups,
)
from distlab.given.sharded_optimizer.uneven import agree, cut, leave_unused

OptimizerFactory = Callable[[list[ParamGroup]], torch.optim.Optimizer]  # e.g. AdamW
WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers that need more than one element at a time, or sparse gradients."""


class Weights(Protocol):
    """Shards and unshards the weights of a bucket at stage 3."""

    is_prefetching: bool

    def shard_bucket(self, bucket: Bucket) -> None:
        """Keep the shard and free the full weights."""

    def unshard_bucket(self, bucket: Bucket) -> None:
        """Gather the full weights."""

    def forget_calls(self) -> None:
        """Forget, after a step, the forwards whose backward hasn't run."""


class BucketOptimizer(torch.optim.Optimizer):
    """An optimizer of shards; `param_groups` and `state` are those of `optimizer`.

    `layers` lists the buckets of each layer, `buckets` has all of them in order, and
    `groups` are the caller's parameter groups. In a step, call loss.backward() one or
    several times, then reduce_gradients(), clip if you like, and call step() and
    zero_grad(). If you didn't reduce, step() does. The methods reduce_gradients, step
    and full_state_dict are collective, and at stage 3 forward and backward are as well.

    Raises:
        ValueError: a trained parameter isn't in exactly one group, a group has a
            parameter that isn't in the model, or the optimizer needs whole parameters.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        groups: Iterable[ParamGroup],
        optimizer_factory: OptimizerFactory,
    ) -> None:
        self.comm, self.model = comm, model
        self.backward: Backward | None = None  # from stage 2 on
        self.weights: Weights | None = None  # at stage 3
        self.groups = [_with_list(group) for group in groups]
        self.modules = layers_of(model)
        self.layers: list[list[Bucket]] = [[] for _ in self.modules]
        self.buckets: list[Bucket] = []
        self._expect_all_parameters()
        self._add_buckets(self.groups)
        self.optimizer = optimizer_factory(self.shard_groups())
        if (name := type(self.optimizer).__name__) in WHOLE:
            raise ValueError(f"{name} cannot be sharded: it needs whole parameters")
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.groups = self.optimizer.param_groups
        self.state, self.defaults = self.optimizer.state, self.optimizer.defaults
        self._own = self._optimized()
        self._is_reduced, self._num_left = False, 0
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        model.zero_grad = ZeroGrad(model, self)  # type: ignore[method-assign]

    # ── what a stage has to do ──────────────────────────────────────────────────────

    def shard_ranges(self, sizes: Sequence[int]) -> Ranges:
        """Return this rank's ranges of a bucket, given the sizes of its parameters."""
        raise NotImplementedError

    def shard_groups(self) -> list[ParamGroup]:
        """Return the parameter groups for `optimizer`."""
        raise NotImplementedError

    def scatter_gradients(self) -> None:
        """Set each shard's gradient, after backward()."""
        raise NotImplementedError

    def update(self) -> None:
        """Update the shards, and then the full weights."""
        raise NotImplementedError

    def state_by_name(self) -> dict[str, Entry]:
        """Return this rank's part of the state."""
        raise NotImplementedError

    def call_in_backward(self, reducer: Reducer) -> Backward:
        """Make backward() call `reducer.reduce_bucket` for each bucket from now on."""
        self.backward = Backward(self.model, reducer)
        for bucket in self.buckets:
            self.backward.add(bucket)
        return self.backward

    # ── a step ──────────────────────────────────────────────────────────────────────

    @property
    def is_reduced(self) -> bool:
        """True if the shards have the gradients of this step."""
        return self._is_reduced

    def reduce_gradients(self) -> None:
        """Set each bucket.shard.grad to this rank's chunk of the mean gradient.

        Raises:
            RuntimeError: the shards have gradients of an earlier step, or a backward()
                hasn't ended.
        """
        if self.backward is not None:
            self.backward.finish()
        elif any(bucket.shard.grad is not None for bucket in self.buckets):
            raise RuntimeError(
                "the shards have gradients already: call zero_grad() after each step, "
                "and reduce_gradients() once, after the last backward()"
            )
        else:
            self.scatter_gradients()
        self._is_reduced, self._num_left = True, self._num_unreduced()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, and return what `closure` returns, if there is one.

        A parameter that had no gradient on any rank isn't updated.

        Raises:
            RuntimeError: gradients arrived after reduce_gradients(), someone changed
                the parameters of `optimizer`, or a parameter that was frozen is now
                trained.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._expect_own_parameters()
        if not self._is_reduced:
            self.reduce_gradients()
        if self._num_unreduced() > self._num_left:
            raise RuntimeError("backward() was called after reduce_gradients()")
        agree(self.comm, self.buckets)
        for bucket in self.buckets:
            leave_unused(self.optimizer, bucket)
            if bucket.in_flight:  # prefetched, and its layer did not compute
                bucket.free()
        self._own = self._optimized()
        if self.weights is None:
            self.update()
        else:
            self.optimizer.step()  # the next forward gathers the new weights
            self.weights.forget_calls()
        self._is_reduced = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; if `set_to_none` is False, they count as zeros."""
        self._is_reduced = False
        for bucket in self.buckets:
            for parameter in (bucket.shard, *bucket.pieces, *bucket.parameters):
                parameter.grad = None
            if set_to_none:
                bucket.was_used = [False] * len(bucket.names)
        if self.backward is not None:
            was_cut_off = self.backward.is_going_on
            self.backward.reset()
            for bucket in self.buckets:
                if self.weights is not None and was_cut_off:
                    bucket.free()

    # ── groups ──────────────────────────────────────────────────────────────────────

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Also train these parameters, with the group's settings; call it on all ranks.

        Raises:
            ValueError: a parameter is frozen, is in a group already, isn't in the
                model, or at stage 3 belongs to several layers.
        """
        if not hasattr(self, "_own"):  # called by torch's constructor
            return
        group = _with_list(param_group)
        self._expect_new(group)
        known = list(self.buckets)
        self._add_buckets([group])
        added = [bucket for bucket in self.buckets if bucket not in known]
        shards = [bucket.shard for bucket in added]
        self.optimizer.add_param_group({**group, "params": shards})
        self._own = self._optimized()
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        for bucket in added:
            if self.backward is not None:
                self.backward.add(bucket)
            if self.weights is not None:
                self.weights.shard_bucket(bucket)

    def _add_buckets(self, groups: Sequence[ParamGroup]) -> None:
        group_of = {p: i for i, g in enumerate(groups) for p in g["params"]}
        for own, layer in zip(self.layers, self.modules, strict=True):
            kinds: dict[Any, dict[str, nn.Parameter]] = {}
            for name, p in layer.named.items():
                if p.requires_grad and p in group_of:
                    kinds.setdefault((group_of[p], p.dtype), {})[name] = p
            for (i, _), kind in kinds.items():
                own.append(Bucket(self.comm, groups[i], kind, self.shard_ranges))
        self.buckets[:] = [bucket for own in self.layers for bucket in own]

    def _expect_all_parameters(self) -> None:
        grouped = [p for group in self.groups for p in group["params"]]
        for name, p in self.model.named_parameters():
            count = sum(p is one for one in grouped)
            if count > 1 or (p.requires_grad and not count):
                raise ValueError(
                    "a trained parameter must be in one group: "
                    f"{name} is in {count or 'none'}"
                )
        if {*grouped} - {*self.model.parameters()}:
            raise ValueError("a group has a parameter that is not in the model")

    def _expect_new(self, group: ParamGroup) -> None:
        known = {p for bucket in self.buckets for p in bucket.parameters}
        whole = {
            p for m, named in self.modules if m is self.model for p in named.values()
        }
        for p in group["params"]:
            name = next((n for n, q in self.model.named_parameters() if q is p), "")
            if not name or p in known or not p.requires_grad:
                why = "is in a group already" if p in known else "is frozen"
                raise ValueError(f"{name} {why}" if name else "it is not in the model")
            if self.weights is not None and p in whole:
                raise ValueError(f"{name} belongs to no single layer: give it at first")

    def _optimized(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _expect_own_parameters(self) -> None:
        now = self._optimized()
        if len(now) != len(self._own) or any(map(_differ, now, self._own)):
            raise RuntimeError(
                "the parameters in param_groups were changed: add_param_group() of the "
                "sharded optimizer itself adds some"
            )
        for p in self._frozen:
            if p.requires_grad and p.grad is not None:
                name = next(n for n, q in self.model.named_parameters() if q is p)
                raise RuntimeError(
                    f"{name} was frozen when the optimizer was made, and now has a "
                    "gradient: add_param_group() trains it"
                )

    def _num_unreduced(self) -> int:
        own = (p for bucket in self.buckets for p in bucket.parameters)
        return sum(p.grad is not None for p in own)

    # ── saved state ─────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state by name in "state", settings in "param_groups"."""
        states = self.state_by_name()
        for bucket in self.buckets:
            parts = zip(bucket.pieces, bucket.shard_ranges, strict=False)
            for piece, (number, start, stop) in parts:
                kept = cut(self.optimizer.state[piece], slice(None))
                states[bucket.names[number]] = {"start": start, "stop": stop, **kept}
        groups = saved_groups(self.optimizer, self.buckets)
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, states: Any) -> None:
        """Continue from the `state_dict()` of all ranks of a run, of any world size.

        Settings such as the learning rate are also loaded.

        Raises:
            ValueError: a state is missing or incomplete, or has other groups. In that
                case, nothing has changed.
        """
        every = [states] if isinstance(states, dict) else list(states)
        if not every or not all({"state", "param_groups"} <= {*one} for one in every):
            raise ValueError("these are not states of a sharded optimizer")
        parts = [one["state"] for one in every]
        found = [entries_for(bucket, parts) for bucket in self.buckets]
        load_groups(self.optimizer, self.buckets, every[0]["param_groups"])
        for bucket, entries in zip(self.buckets, found, strict=True):
            load_bucket(self.optimizer, bucket, entries)
        self._own = self._optimized()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the model's state_dict() with full weights on every rank."""
        freed = [bucket for bucket in self.buckets if not bucket.is_unsharded]
        for bucket in freed:
            assert self.weights is not None
            self.weights.unshard_bucket(bucket)
        full = {name: v.clone() for name, v in self.model.state_dict().items()}
        for bucket in freed:
            bucket.free()
        return full


class ZeroGrad:
    """The model's zero_grad(), which also clears the gradients of the shards."""

    def __init__(
        self, model: nn.Module, optimizer: BucketOptimizer | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        type(self.model).zero_grad(self.model, set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def __reduce__(self) -> Any:
        """Leave the optimizer out of a copy of the model."""
        return ZeroGrad, (self.model,)


def _with_list(group: ParamGroup) -> ParamGroup:
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else [*params]}


def _differ(one: object, other: object) -> bool:
    return one is not other
