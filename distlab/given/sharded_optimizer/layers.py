"""Stage 3: layers that gather and free their weights, in all the ways people use them.

Outputs may be tuples, dicts, dataclasses or views of the weights. A forward may belong
to a checkpoint, or may raise. And someone may want to save the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Work
from distlab.given.sharded_optimizer.backward import Backward
from distlab.given.sharded_optimizer.buckets import Bucket
from distlab.given.sharded_optimizer.freed import FreedMemoryError as FreedMemoryError
from distlab.given.sharded_optimizer.optimizer import BucketOptimizer


class EachOutput(nn.Module):
    """A layer whose forward hooks get the tensors of its output one by one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._hidden = [layer]  # in a list: it is no child

    def register_forward_hook(self, hook: Any, **how: Any) -> Any:
        """Register `hook(layer, inputs, tensor)` for each tensor in the output."""

        def for_each(layer: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                hook(layer, inputs, tensor)

        return self._hidden[0].register_forward_hook(for_each, **how)

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a backward hook on the layer itself."""
        return self._hidden[0].register_full_backward_pre_hook(hook, prepend)


class ShardedLayers:
    """Calls a subclass whenever a layer needs its full weights or no longer does.

    `layers` lists each layer's buckets. The constructor calls shard_bucket for each
    bucket, then hook_forward and hook_backward for each layer.
    """

    is_prefetching = False

    def __init__(self, optimizer: BucketOptimizer, backward: Backward) -> None:
        self.comm, self.backward = optimizer.comm, backward
        self.layers, self.buckets = optimizer.layers, optimizer.buckets
        optimizer.weights = backward.reducer = self
        modules = [layer.module for layer in optimizer.modules]
        for module in optimizer.model.modules():
            module.register_state_dict_pre_hook(self._expect_weights)
            module.register_load_state_dict_pre_hook(self._expect_weights)
        self._calls = [0] * len(modules)  # forwards whose backward is still to come
        for bucket in self.buckets:
            self.shard_bucket(bucket)
        for number, layer in enumerate(modules):
            own = self.layers[number]
            hook = partial(self._watch_inputs, number)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            layer.register_forward_hook(partial(_out_of_flat, own))
            layer.register_forward_hook(self._watch)
            self.hook_forward(number, layer)
            self.hook_backward(number, EachOutput(layer))
            free = partial(self._free_after_error, own)
            layer.register_forward_hook(free, always_call=True)

    # ── what stage 3 has to do ──────────────────────────────────────────────────────

    def shard_bucket(self, bucket: Bucket) -> None:
        """Keep the shard and free the full weights."""
        raise NotImplementedError

    def unshard_bucket(self, bucket: Bucket) -> None:
        """Gather the full weights."""
        raise NotImplementedError

    def hook_forward(self, number: int, layer: nn.Module) -> None:
        """Call unshard_layer before the layer's forward, and reshard_layer after it."""
        raise NotImplementedError

    def hook_backward(self, number: int, layer: nn.Module) -> None:
        """Call unshard_layer before the layer's backward."""
        raise NotImplementedError

    def reduce_bucket(self, bucket: Bucket) -> None:
        """Reduce the bucket's gradients, because the layer's backward has ended."""
        raise NotImplementedError

    def prefetch(self, bucket: Bucket) -> list[Work]:
        """Start gathering the full weights, and return the Works to wait for."""
        raise NotImplementedError

    # ── what hooks call ─────────────────────────────────────────────────────────────

    def unshard_layer(self, number: int, following: int, *_: Any) -> None:
        """Gather the weights of layer `number` before it computes.

        If prefetching is on, also start gathering those of layer `following`, which
        computes next, provided there is such a layer.
        """
        for bucket in self.layers[number]:
            bucket.wait()
            if self._is_needed(bucket):
                self.unshard_bucket(bucket)
        if self.is_prefetching and 0 <= following < len(self.layers):
            for bucket in self.layers[following]:
                if self._is_needed(bucket):
                    bucket.in_flight = self.prefetch(bucket)

    def reshard_layer(self, number: int, *_: Any) -> None:
        """Free the full weights of layer `number` after it computed; keep the shards.

        Within backward(), that is in a checkpoint's forward, the weights stay.
        """
        for bucket in self.layers[number]:
            if not self.backward.is_going_on:
                bucket.free()

    def _is_needed(self, bucket: Bucket) -> bool:
        is_done = self.backward.is_going_on and bucket not in self.backward.unreduced
        return not bucket.is_unsharded and not is_done

    def _watch(self, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _watch_inputs(self, number: int, _layer: Any, args: Any, kwargs: Any) -> Any:
        """Find out when the layer's backward ends, even if some parameters are unused.

        Every rank then reduces at the same point between the other collectives.
        """
        given = [t for t in _tensors(args, kwargs) if t.requires_grad]
        if not given or not torch.is_grad_enabled():
            return None
        self._calls[number] += 1
        passed = iter(_Told.apply(partial(self._end_of_call, number), *given))  # type: ignore[no-untyped-call]
        return _mapped((args, kwargs), lambda t: next(passed) if t.requires_grad else t)

    def _end_of_call(self, number: int) -> None:
        self._calls[number] -= 1
        if not self._calls[number]:
            self.backward.end_of(self.layers[number])

    def forget_calls(self) -> None:
        """Forget, after a step, the forwards whose backward hasn't run."""
        self._calls = [0] * len(self._calls)

    def _begin(self, _gradient: Tensor) -> None:
        self.backward.begin()

    def _free_after_error(
        self, own: list[Bucket], _layer: nn.Module, _inputs: Any, output: Any
    ) -> None:
        if output is None and not self.backward.is_going_on:
            for bucket in own:
                bucket.free()

    def _expect_weights(self, *_: Any) -> None:
        if not all(bucket.is_unsharded for bucket in self.buckets):
            raise FreedMemoryError(
                "the model's weights are sharded: full_state_dict() of the optimizer "
                "gathers them, on all ranks; load weights before sharding them"
            )


class _Told(torch.autograd.Function):
    """Returns the inputs unchanged, and calls `tell` when their gradients are known."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *inputs: Tensor) -> Any:
        """Return the inputs."""
        ctx.tell = tell
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Call `tell` and pass on the gradients."""
        ctx.tell()
        return None, *gradients


def _tensors(*values: Any) -> list[Tensor]:
    """Return the tensors in a layer's inputs, in the order of `_mapped`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(values, note)
    return found


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a layer's output.

    Raises:
        TypeError: the output is an object that we can't search for tensors.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for one in output:
            yield from tensors_in(one)
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif dataclasses.is_dataclass(output):
        fields = dataclasses.fields(output)
        yield from tensors_in([getattr(output, field.name) for field in fields])
    elif output is not None and not isinstance(output, str | int | float | complex):
        raise TypeError(
            f"a layer returns a {type(output).__name__}: stage 3 needs tensors, or "
            "tuples, lists, dicts and dataclasses of them"
        )


def _out_of_flat(
    own: list[Bucket], _layer: nn.Module, _inputs: Any, output: Any
) -> Any:
    """Return the output, with copies in place of views of the layer's weights."""
    flats = {bucket.flat.untyped_storage()._cdata for bucket in own}

    def is_view(tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in flats

    if not any(map(is_view, tensors_in(output))):
        return None
    return _mapped(output, lambda one: one.clone() if is_view(one) else one)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, change) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, change) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: _mapped(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **changed)
    return value
