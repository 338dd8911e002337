"""Parameters without memory: allow questions about metadata, and refuse all others.

Without this class, torch would read freed memory, and the process would crash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

_NEEDS_NO_NUMBERS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset",
    "element_size", "is_contiguous", "is_floating_point", "is_complex", "type",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "untyped_storage", "data_ptr", "get_device", "__len__",
}  # fmt: skip
_NUMBERS = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that are views


class FreedMemoryError(RuntimeError):
    """Raised if an operation gets a tensor without memory, where torch would crash."""


class FreedParameter(nn.Parameter):
    """The class of a parameter while its memory is freed."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Allow access to metadata and gradients, but not to the numbers.

        Raises:
            FreedMemoryError: the operation needs numbers.
        """
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if (is_attribute and attribute not in _NUMBERS) or name in _NEEDS_NO_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        freed = (a for a in _flat((args, kwargs)) if isinstance(a, FreedParameter))
        return _refuse(next(freed))

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the parameter's name and shape."""
        return f"sharded parameter {_name(self)}, shape {tuple(self.shape)}: no memory"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to copy a parameter without memory."""
        _refuse(self)

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        """Refuse to pickle a parameter without memory."""
        _refuse(self)


def guard(parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
    """Mark the parameters as freed, so that using their numbers raises an error."""
    for parameter, name in zip(parameters, names, strict=True):
        if type(parameter) is nn.Parameter:
            parameter._distlab_name = name  # type: ignore[attr-defined]
            parameter.__class__ = FreedParameter


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `guard`, because the parameters have memory again."""
    for parameter in parameters:
        if type(parameter) is FreedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _refuse(parameter: nn.Parameter) -> NoReturn:
    raise FreedMemoryError(
        f"{_name(parameter)} is sharded and its full weights are freed: they can be "
        "used within the forward and backward of its layer; full_state_dict() of the "
        "optimizer gathers all weights, on all ranks"
    )


def _name(parameter: nn.Parameter) -> str:
    return str(getattr(parameter, "_distlab_name", "a parameter"))


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value
