"""What a hook sends, and whether the callbacks of its futures wait for messages.

torch calls a callback on a thread of gloo that runs collectives. What a callback sends
counts for its hook; a callback that waits there is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FUTURE: Any = torch._C.Future


def type_of_value(future: Any) -> str:
    """The type of the future's value if DDP cannot use it, and ""; it does not wait."""
    if future is None or not future.done():
        return ""
    try:
        value = future.value()
    except Exception:  # the callback's own: torch raises it
        return ""
    return "" if isinstance(value, Tensor) else type(value).__name__


class Watch:
    """While it is entered, callbacks of futures are watched.

    `on_callback` is called when one waits or sends, `on_second` before a hook's second
    message.
    """

    def __init__(
        self, on_callback: Callable[[], None], on_second: Callable[[], None]
    ) -> None:
        self._on_callback, self._on_second = on_callback, on_second
        self._here = threading.local()  # call: of the hook; sent: by its callback
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Watch:
        for name in ("then", "add_done_callback"):
            self._replace(_FUTURE, name, self._later)
        self._replace(_FUTURE, "wait", self._waiting)
        self._replace(dist.Work, "wait", self._waiting)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for place, name, real in reversed(self._undo):
            setattr(place, name, real)

    @contextmanager
    def of(self, call: dict[str, Any]) -> Iterator[None]:
        """While a hook runs: notes go into `call`, also those of its callbacks."""
        self._here.call = call
        try:
            with _Sent(call["sent"], self._on_second):
                yield
        finally:
            self._here.call = None

    def _replace(self, place: Any, name: str, around: Callable[[Any], Any]) -> None:
        real = getattr(place, name)
        self._undo.append((place, name, real))
        setattr(place, name, around(real))

    def _later(self, real: Any) -> Any:
        @wraps(real)
        def later(future: Any, callback: Any) -> Any:
            call = getattr(self._here, "call", None)
            return real(future, self._noted(callback, call) if call else callback)

        return later

    def _noted(self, callback: Any, call: dict[str, Any]) -> Any:
        @wraps(callback)
        def noted(done: Any) -> Any:
            before = (
                getattr(self._here, "call", None),
                getattr(self._here, "sent", None),
            )
            self._here.call, self._here.sent = call, list[tuple[str, int]]()
            try:
                with _Sent(self._here.sent):
                    return callback(done)
            finally:
                if self._here.sent:
                    call["sends_later"] = True
                    self._on_callback()
                if before[0] is not call:  # else the hook's own note has it
                    call["sent"].extend(self._here.sent)
                self._here.call, self._here.sent = before

        return noted

    def _waiting(self, real: Any) -> Any:
        @wraps(real)
        def wait(one: Any, *args: Any, **named: Any) -> Any:
            sent = getattr(self._here, "sent", None)
            if sent is not None:  # in a callback
                is_done = one.done() if isinstance(one, _FUTURE) else one.is_completed()
                if sent or not is_done:
                    self._here.call["waits"] = True
                    self._on_callback()
                if sent:  # with all its threads waiting, gloo could run no collective
                    raise RuntimeError("a callback waits for what it has sent")
            return real(one, *args, **named)

        return wait


class _Sent(TorchDispatchMode):
    """While it is entered: name and bytes of what each collective was given to send.

    By the cost of the byte meter: all_gather (n-1) times the bytes, all_reduce
    2(n-1)/n times, all others (n-1) times.
    """

    def __init__(
        self,
        sent: list[tuple[str, int]],
        on_second: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent, self._on_second = sent, on_second

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        is_collective = func.namespace == "c10d"
        if is_collective and len(self._sent) == 1:
            self._on_second()
        done = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if is_collective and tensors:
            self._note(func._opname.strip("_"), max(tensors, key=_size))
        return done

    def _note(self, name: str, largest: Tensor) -> None:
        n, size = dist.get_world_size(), _size(largest)
        if name == "allgather_base":  # the largest is the output
            sent = (n - 1) * size // n
        elif "allreduce" in name:
            sent = 2 * (n - 1) * size // n
        else:
            sent = (n - 1) * size
        self._sent.append((f"{name} of {str(largest.dtype)[6:]}", sent))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
