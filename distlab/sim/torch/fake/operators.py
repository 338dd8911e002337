"""Operators on fake tensors: they have results, and nothing is computed.

For each operator torch is asked once which shapes, strides and dtypes come out of such
arguments (by its own FakeTensorMode); later ranks and steps find the answer in a table.
A large model's step is a few thousand look-ups, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from distlab.sim.torch.fake.account import ACTIVATIONS, OPTIMIZER, OTHER, Account
from distlab.sim.torch.fake.plans import Plan, aten, plan_of
from distlab.sim.torch.fake.tensors import PLAIN, FakeTensors
from distlab.sim.torch.fake.unknown import refuse
from distlab.sim.torch.modes import RankMode
from distlab.sim.torch.storages import on_cpu

_KNOWN_ELEMENTS = 1 << 16  # of results that are computed, if all they need is known

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # with the strides


class Answer:
    """What comes out of an operator: shapes, and how many operations it takes."""

    __slots__ = ("flops", "num_elements", "outs")

    def __init__(self, outs: Any, flops: float) -> None:
        self.outs, self.flops = outs, flops
        self.num_elements = sum(_elements(outs))


class FakeCompute(RankMode):
    """While it is active, the operators of this thread are carried out so."""

    def __init__(
        self,
        fakes: FakeTensors,
        account: Account,
        charge: Callable[[float], None],
        answers: dict[Any, Answer],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes, self.account, self._charge = fakes, account, charge
        self._answers = answers
        self.is_in_step = False  # of an optimizer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Carry out one operator."""
        kwargs = kwargs or {}
        if "device" in kwargs:  # of a pretend GPU
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
            kwargs.pop("pin_memory", None)
        if _active(_TORCHS_FAKES) is not None:
            return func(*args, **kwargs)  # torch asks itself for a shape
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented
        plan = plan_of(func)
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # there, nobody else has taken it apart
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if plan.way == "looks":
            return func(*args, **kwargs)
        if plan.way == "inside":
            with self:
                return func._op_dk(plan.key, *args, **kwargs)
        return self._carried_out(func, plan, args, kwargs)

    def _carried_out(
        self, func: Any, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        tensors: list[Tensor] = []
        key: Any = func, torch.get_default_dtype(), _key(args, tensors)
        if kwargs:
            key = (*key, tuple((name, _key(kwargs[name], tensors)) for name in kwargs))
        if any(tensor.is_meta for tensor in tensors):
            if kwargs.get("device") in (None, _META):
                return func(*args, **kwargs)
            tensors = []  # it is made anew, as by Module.to_empty()
        is_known = not any(map(self.fakes.is_unknown, tensors))
        if plan.way == "writes":
            return self._written(func, plan, args, kwargs, key, is_known)
        if plan.way == "reads":
            return func(*args, **kwargs) if is_known else refuse(str(func))
        return self._made(func, plan, args, kwargs, key, tensors, is_known)

    def _written(
        self,
        func: Any,
        plan: Plan,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        key: Any,
        is_known: bool,
    ) -> Any:
        if func is aten.resize_.default and not is_known:
            return self._resized(*args, **kwargs)
        if is_known:
            return func(*args, **kwargs)
        if plan.forgets:
            for place in plan.written:
                self._forget(_at(args, kwargs, place))
        outs: Any = None
        if None in plan.returned or plan.flops is not None:
            answer = self._answer(func, plan, args, kwargs, key)
            self._charge(answer.flops)
            outs = answer.outs
        if not plan.returned:
            return None
        several = len(plan.returned) > 1
        results = [
            self._new(outs[i] if several else outs, ACTIVATIONS)
            if place is None
            else _at(args, kwargs, place)
            for i, place in enumerate(plan.returned)
        ]
        return tuple(results) if several else results[0]

    def _forget(self, written: Any) -> None:
        if isinstance(written, Tensor):
            self.fakes.forget(written)
        elif isinstance(written, (list, tuple)):
            for one in written:
                self._forget(one)

    def _resized(self, tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
        like = torch.empty(size, dtype=tensor.dtype, device="meta")
        made = self._new((tuple(size), like.stride(), tensor.dtype), OTHER)
        return tensor.set_(made.untyped_storage(), 0, tuple(size), like.stride())

    def _made(
        self,
        func: Any,
        plan: Plan,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        key: Any,
        tensors: list[Tensor],
        is_known: bool,
    ) -> Any:
        if not tensors and kwargs.get("device") == _META:
            return func(*args, **kwargs)
        try:
            answer = self._answer(func, plan, args, kwargs, key)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if is_known:
                return func(*args, **kwargs)
            return refuse(str(func))
        if answer.flops:
            self._charge(answer.flops)
        if is_known and answer.num_elements <= _most_known(tensors, answer.outs):
            return func(*args, **kwargs)
        kind = ACTIVATIONS if tensors else OTHER
        if self.is_in_step:
            kind = OPTIMIZER if _is_factory(func) else OTHER
        return self._new(answer.outs, kind)

    def _answer(
        self, func: Any, plan: Plan, args: Any, kwargs: Any, key: Any
    ) -> Answer:
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _asked(func, plan, args, kwargs)
        return answer

    def _new(self, outs: Any, kind: int) -> Any:
        if type(outs) is tuple:
            shape, stride, dtype = outs
            return self.fakes.make(shape, stride, dtype, self.account, kind)
        if type(outs) is list:
            return [self._new(out, kind) for out in outs]
        if type(outs) is _Several:
            return tuple(self._new(out, kind) for out in outs.outs)
        return outs


_META = torch.device("meta")
_active = torch._C._get_dispatch_mode
_TORCHS_FAKES = torch._C._TorchDispatchModeKey.FAKE
_LIKE = ("zeros", "ones", "empty", "full", "new_", "rand")


def _is_factory(func: Any) -> bool:
    return str(func._overloadpacket._qualified_op_name)[6:].startswith(_LIKE)


class _Several:
    """A tuple of results; a plain one is the shape of one tensor."""

    __slots__ = ("outs",)

    def __init__(self, outs: list[Any]) -> None:
        self.outs = outs

    def __getitem__(self, index: int) -> Any:
        return self.outs[index]


def _most_known(tensors: list[Tensor], outs: Any) -> int:
    """The elements that a result may have in order to be computed.

    A vector of floating-point numbers that a program makes of nothing is a parameter,
    or something like it; a single one may be a counter.
    """
    if tensors:
        return _KNOWN_ELEMENTS
    is_one_float = type(outs) is tuple and outs[2].is_floating_point
    return 1 if is_one_float else _KNOWN_ELEMENTS


def _elements(outs: Any) -> list[int]:
    if type(outs) is tuple:
        number = 1
        for size in outs[0]:
            number *= size
        return [number]
    if type(outs) is _Several:
        outs = outs.outs
    return [n for out in outs for n in _elements(out)] if type(outs) is list else []


def _asked(func: Any, plan: Plan, args: Any, kwargs: Any) -> Answer:
    """Have torch work the result out, with tensors of its own."""
    with FakeTensorMode():

        def stand_in(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype
                )
            if isinstance(value, (list, tuple)):
                return type(value)(map(stand_in, value))
            return value

        own = stand_in(args)
        own_kwargs = {name: stand_in(value) for name, value in kwargs.items()}
        out = func(*own, **own_kwargs)
        flops = 0.0
        if plan.flops is not None:
            flops = float(plan.flops(*own, **own_kwargs, out_val=out))
    return Answer(_shapes(out), flops)


def _shapes(out: Any) -> Any:
    if isinstance(out, Tensor):
        return tuple(out.shape), out.stride(), out.dtype
    if isinstance(out, tuple):
        return _Several([_shapes(one) for one in out])
    if isinstance(out, list):
        return [_shapes(one) for one in out]
    return out


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """What the shape of a result can depend on; `tensors` gets those that are found."""
    kind = value.__class__
    if kind is tuple or kind is list:
        return tuple([_key(one, tensors) for one in value])
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, value.shape, value.stride()
    if kind in _NUMBERS:
        return kind, value  # 1, 1.0 and True are equal
    if kind is torch.Generator:
        return None
    return value


_NUMBERS = (int, float, bool)


def _at(args: Sequence[Any], kwargs: dict[str, Any], place: int | str) -> Any:
    if isinstance(place, int):
        return args[place] if place < len(args) else None
    return kwargs.get(place)
