"""Values between processes as JSON lines: no pickle, so a rank cannot run code here.

Tensors travel as dtype, shape and bytes. Everything else is JSON; tuples stay tuples,
and so do the keys of a dictionary that are not text:

    (1, 2)      {"~tuple": [1, 2]}              {3: "x"}    {"~dict": [[3, "x"]]}

A text that starts with `~` is our mark, so as a user's key it travels as a `~dict` too.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_SCALARS = frozenset({type(None), bool, int, float, str})


def encode(value: Any) -> bytes:
    """One line, newline included, that `decode` turns back into `value`.

    Raises:
        TypeError: a value that is neither plain data nor a tensor.
    """
    return _ENCODER.encode(_plain(value)).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The value that `encode` was given.

    Raises:
        ValueError: the line was not written by `encode`.
    """
    try:
        if b'"~' not in line:  # no mark: most lines have none
            return json.loads(line)
        return json.loads(line, object_hook=_rich)
    except (TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a line of ours: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"~tuple": _plain_items(value)}
    if isinstance(value, list):
        return _plain_items(value)
    if isinstance(value, dict):
        if all(isinstance(key, str) and key[:1] != "~" for key in value):
            return {
                key: item if type(item) in _SCALARS else _plain(item)
                for key, item in value.items()
            }
        return {"~dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if _is_tensor(value):
        return {"~tensor": _tensor_parts(value)}
    raise TypeError(f"a {type(value).__name__} cannot travel between processes")


def _plain_items(values: Sequence[Any]) -> Sequence[Any]:
    if _SCALARS.issuperset(map(type, values)):  # long lists of numbers are common
        return values
    return [_plain(item) for item in values]


def _rich(found: dict[str, Any]) -> Any:
    """What an object of JSON stands for; the objects in it have been turned before."""
    if len(found) == 1:
        ((key, value),) = found.items()
        if key == "~tuple":
            return tuple(value)
        if key == "~dict":
            return dict(value)
        if key == "~tensor":
            return _tensor(*value)
    if any(key[:1] == "~" for key in found):
        raise ValueError(f"unknown mark in {sorted(found)}")
    return found


def _is_tensor(value: Any) -> bool:
    # Where torch has not been imported there are no tensors, and no need to import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_parts(tensor: Tensor) -> list[Any]:
    import torch

    values = tensor.detach().cpu().resolve_conj().resolve_neg()  # not a view's promise
    plain = values.contiguous().reshape(-1).view(torch.uint8)
    data = base64.b64encode(plain.numpy().tobytes()).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def _tensor(dtype_name: str, shape: list[int], data: str) -> Tensor:
    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is not a tensor dtype")
    raw = bytearray(base64.b64decode(data))
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)
