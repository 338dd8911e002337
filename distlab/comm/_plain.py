"""Give transports plain memory, and sum float16 averages in float32.

A conjugate or negative view shares the memory of another tensor and flips signs when
it is read. A transport reads the memory directly, so it would send the wrong numbers.
Averages of float16 need care too: the sum of two numbers can overflow to inf even when
their mean fits. We sum them in float32, which doubles the bytes sent.

    @plain        pass ordinary tensors to the method, and copy its results back into
                  the caller's tensors (in wait(), if the call returns a Work)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from distlab.comm._protocol import ReduceOp, Work

F = TypeVar("F", bound=Callable[..., Any])
_SENT = frozenset({"send_tensor", "input"})  # by their names in Comm: only read
_TENSORS = frozenset({"tensor", "recv_tensor", "output", *_SENT})


def resolved(tensor: Tensor) -> Tensor:
    """Return the tensor, or a plain copy if it is a conjugate or negative view."""
    return tensor.resolve_conj().resolve_neg()


def is_view(tensor: object) -> bool:
    """Return True if `tensor` is a tensor with its conjugate or negative bit set."""
    return isinstance(tensor, Tensor) and (tensor.is_conj() or tensor.is_neg())


def plain(method: F) -> F:
    """Wrap a transport's method so that it only sees tensors in plain memory."""
    signature = inspect.signature(method)
    is_sent = _SENT | ({"tensor"} if "send" in method.__name__ else set())

    @functools.wraps(method)
    def with_plain(self: Any, *arguments: Any, **named: Any) -> Any:
        for given in (*arguments, *named.values()):
            if given is ReduceOp.AVG or is_view(given):
                break
        else:
            return method(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named)
        halves = bound.arguments.get("op") is ReduceOp.AVG
        copies = []
        for name in _TENSORS & bound.arguments.keys():
            tensor = bound.arguments[name]
            values = _values(tensor, halves)
            if values is not tensor:
                bound.arguments[name] = values
                copies += [] if name in is_sent else [(tensor, values)]
        result = method(*bound.args, **bound.kwargs)
        if bound.arguments.get("async_op") or method.__name__ == "irecv":
            return _CopiedBack(result, copies) if copies else result
        _copy_back(copies)
        return result

    return cast("F", with_plain)


def _values(tensor: Any, halves: bool) -> Any:
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    if not is_dense or not tensor.is_contiguous():
        return tensor  # the method itself rejects these
    if halves and tensor.dtype is torch.float16:
        return tensor.detach().float()
    return resolved(tensor.detach()) if is_view(tensor) else tensor


class _CopiedBack:
    """A Work whose wait() also copies the results into the caller's tensors."""

    def __init__(self, work: Work, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        self._work.wait(timeout_s)
        copies, self._copies = self._copies, []
        _copy_back(copies)

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`: False until wait() has copied."""
        return not self._copies and self._work.is_completed()


def _copy_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, values in copies:
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(values)
