"""Replace functions of libraries for the ranks of a run, and put them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.jit._builtins import _find_builtin, _get_builtin_table, _register_builtin

from distlab.sim.torch.rank import here

_MISSING = object()


class Refused(RuntimeError):  # noqa: N818 - users read the name in a sentence
    """A script asks for something that cannot be simulated."""


def made_elsewhere(original: type, ours: Callable[..., Any]) -> type:
    """A class like `original` that on a rank gives what `ours(...)` returns."""

    class Elsewhere(original):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            make = original if here() is None else ours
            return make(*args, **kwargs)

    Elsewhere.__name__ = original.__name__
    return Elsewhere


class Replaced:
    """What was replaced; `undo` puts it all back, the last one first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._scripted: list[Any] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or make one that was not there."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def for_ranks(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """On a rank, `ours(*args)` is called instead; elsewhere what was there.

        Nothing happens if this version of the library has no such function.
        """
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def either(*args: Any, **kwargs: Any) -> Any:
            which = original if here() is None else ours
            return which(*args, **kwargs)

        self.put(owner, name, either)
        operator = _find_builtin(original)
        if operator is not None:  # TorchScript knows operators by their functions
            _register_builtin(either, operator)
            self._scripted.append(either)

    def with_original(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """The same for `ours(original, *args)`."""
        original = getattr(owner, name, None)
        if original is not None:
            self.for_ranks(owner, name, functools.partial(ours, original))

    def refuse(self, owner: Any, name: str, call: str, why: str) -> None:
        """On a rank the call raises `Refused`; a class remains one, for annotations."""

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise Refused(f"{call} can't be simulated: {why}")

        original = getattr(owner, name, None)
        if isinstance(original, type):
            self.put(owner, name, made_elsewhere(original, refused))
        else:
            self.for_ranks(owner, name, refused)

    def undo(self) -> None:
        """Put everything back."""
        while self._scripted:
            _get_builtin_table().pop(id(self._scripted.pop()), None)
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
