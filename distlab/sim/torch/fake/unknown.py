"""Values that nobody knows: of fake tensors.

To print a loss or to add it to a total does no harm, so a script that does so runs: it
gets an Unknown, which is shown as "?". To decide by one (`if loss < best`) is another
matter: what the script would do next nobody knows, so that is refused, with the line.
"""

from __future__ import annotations

import linecache
import math
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from distlab.runner.autopsy import own_frame
from distlab.sim.torch.fake.tensors import PLAIN, FakeTensors
from distlab.sim.torch.replacing import Replaced

_MOST = 1 << 16  # elements that are handed out, as a list or as an array


class DataDependentError(RuntimeError):
    """The program's next step depends on values that fake tensors don't have."""


def refuse(what: str) -> NoReturn:
    """Raise an error that names `what`, and quotes the program's line.

    Raises:
        DataDependentError: always.
    """
    stack = traceback.walk_stack(sys._getframe(1))
    frames = [(frame.f_code.co_filename, line) for frame, line in stack]
    at = own_frame(tuple(reversed(frames)))
    code = linecache.getline(*at).strip() if at else ""
    line = f" in `{code}`" if code else ""
    raise DataDependentError(
        f"{what}{line} depends on values of a fake tensor, and it has none; take the "
        "condition out, or run the script on real tensors"
    )


class Unknown(float):
    """A number of which only the type is known; in sums it stays unknown.

    Where Python wants a number after all (`"%.3f" % x`, `math.exp(x)`) it is 1.
    """

    def __new__(cls, *_: Any) -> Unknown:
        """There is one kind of unknown number."""
        return super().__new__(cls, 1.0)

    def __format__(self, spec: str) -> str:
        """A question mark, as wide as the number would have been."""
        width = "".join(takewhile(str.isdigit, spec.lstrip("<>^+- ")))
        return format("?", f">{width}" if width else "")

    def __repr__(self) -> str:
        return "?"

    __str__ = __repr__

    def __hash__(self) -> int:
        return id(self)


def _stays_unknown(name: str) -> Callable[..., Any]:
    def operation(self: Unknown, *_: Any) -> Any:
        return Unknown()

    operation.__name__ = name
    return operation


def _decides(name: str, shown: str) -> Callable[..., Any]:
    def operation(self: Any, *_: Any) -> Any:
        refuse(shown)

    operation.__name__ = name
    return operation


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        _full = f"__{_side}{_name}__"
        setattr(Unknown, _full, _stays_unknown(_full))
for _name in ("__neg__", "__pos__", "__abs__", "__round__"):
    setattr(Unknown, _name, _stays_unknown(_name))
_DECIDE = (
    *(("__lt__", "<"), ("__le__", "<="), ("__gt__", ">"), ("__ge__", ">=")),
    *(("__eq__", "=="), ("__ne__", "!="), ("__bool__", "bool()"), ("__int__", "int()")),
    *(("__trunc__", "int()"), ("__floor__", "floor()"), ("__ceil__", "ceil()")),
)
for _name, _sign in _DECIDE:
    setattr(Unknown, _name, _decides(_name, _sign))


# ── what a tensor tells ─────────────────────────────────────────────────────────────


def replace_tellers(replaced: Replaced, fakes: FakeTensors) -> None:
    """Replace the methods with which Python reads a tensor's values."""
    for name, tell in _TELLERS.items():
        replaced.put(Tensor, name, _teller(name, tell, fakes))


def _teller(
    name: str, tell: Callable[[Tensor], Any], fakes: FakeTensors
) -> Callable[..., Any]:
    before = getattr(Tensor, name)

    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in PLAIN and _is_unknown(tensor, fakes):
            return tell(tensor)
        return before(tensor, *args, **kwargs)

    method.__name__ = name
    return method


def _is_unknown(tensor: Tensor, fakes: FakeTensors) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and fakes.is_unknown(tensor)
    )


def _refuse_to_tell(what: str, tensor: Tensor) -> NoReturn:
    refuse(what)


def _small(tensor: Tensor, what: str) -> Tensor:
    if tensor.numel() > _MOST:
        refuse(f"{what} of {tensor.numel():,} elements")
    return tensor


def _nested(tensor: Tensor) -> Any:
    def rows(shape: tuple[int, ...]) -> Any:
        return [rows(shape[1:]) for _ in range(shape[0])] if shape else Unknown()

    return rows(tuple(tensor.shape))


def _as_array(tensor: Tensor) -> Any:
    shape = tuple(_small(tensor, "numpy()").shape)
    kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return np.full(shape, math.nan if tensor.is_floating_point() else 0, dtype=kind)


def _described(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"tensor(?, shape={list(tensor.shape)}, dtype={kind})"


_TELLERS: dict[str, Callable[[Tensor], Any]] = {
    **{
        f"__{name}__": partial(_refuse_to_tell, f"{name}()")
        for name in ("bool", "int", "index", "contains")
    },
    "item": lambda tensor: Unknown(),
    "__float__": lambda tensor: 1.0,
    "tolist": lambda tensor: _nested(_small(tensor, "tolist()")),
    "numpy": _as_array,
    "__array__": _as_array,
    "__repr__": _described,
    "__format__": lambda tensor: "?",
}
