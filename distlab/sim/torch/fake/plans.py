"""What an operator does with fake tensors, read from its declaration.

looks     its result is a view, or only a tensor's shape changes: it runs as it is
writes    it changes tensors that it is given: nothing happens, but their values are
          unknown from now on
makes     its result is new: a fake tensor of the shape that torch works out
reads     its result is a number that depends on values: refused
inside    it is made of other operators, in Python or in C++: those are asked
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from distlab.sim.torch.flops import formula_of

Way = Literal["looks", "writes", "makes", "reads", "inside"]
aten = torch.ops.aten

_LOOKS = {aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default}
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_KEPT = {aten._amp_foreach_non_finite_check_and_unscale_.default}
"""Operators whose result stays known: an overflow is taken not to happen."""

_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("CompositeExplicitAutograd", "CPU", "CompositeImplicitAutograd")
)


@dataclass(frozen=True)
class Plan:
    """How one operator is carried out.

    `written` are the places of the arguments that it changes, as positions or names;
    `returned` has for each of its results the place of the argument that it is, or
    None for a new one. `key` is where the body of one of the kind `inside` is found.
    """

    way: Way
    written: tuple[int | str, ...] = ()
    returned: tuple[int | str | None, ...] = ()
    forgets: bool = True
    flops: Any = None
    key: Any = None


_PLANS: dict[int, Plan] = {}  # by the operator's id: to hash one takes Python


def plan_of(func: Any) -> Plan:
    """The plan of an operator; they are made once."""
    plan = _PLANS.get(id(func))
    if plan is None:
        plan = _PLANS[id(func)] = _made(func)
    return plan


def _made(func: Any) -> Plan:
    flops = formula_of(func)
    if func in _READS:
        return Plan("reads")
    if func.namespace not in ("aten", "prims"):
        key = next((key for key in _KEYS if _has_kernel(func, key)), None)
        if key is not None:
            return Plan("inside", key=key)
    schema = func._schema
    places = {
        kind: place
        for place, argument in _placed(schema)
        for kind in _written_sets(argument)
    }
    if not places:
        way: Way = "looks" if func in _LOOKS or _is_view(schema) else "makes"
        return Plan(way, flops=flops)
    if torch.Tag.inplace_view in func.tags and func is not aten.resize_.default:
        return Plan("looks")
    returned = tuple(
        next((places[kind] for kind in _written_sets(one)), None)
        for one in schema.returns
    )
    written = tuple(dict.fromkeys(places.values()))
    return Plan("writes", written, returned, func not in _KEPT, flops)


def _has_kernel(func: Any, key: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    ) or key in getattr(func, "py_kernels", ())


def _placed(schema: Any) -> list[tuple[int | str, Any]]:
    """Each argument with its place: a position, or a name if it has none."""
    return [
        (argument.name if argument.kwarg_only else position, argument)
        for position, argument in enumerate(schema.arguments)
    ]


def _written_sets(argument: Any) -> list[str]:
    alias = argument.alias_info
    return sorted(alias.before_set) if alias is not None and alias.is_write else []


def _is_view(schema: Any) -> bool:
    return any(one.alias_info is not None for one in schema.returns)
