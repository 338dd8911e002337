"""Replace functions of torch by ones that also write into the rank's log, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distlab.audit.log import current


class Patches:
    """Everything that was replaced; `stack` puts it back."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of an attribute, if there is one."""
        original = owner.__dict__.get(name, None)
        if original is None:
            return
        new = make(original)
        setattr(owner, name, new)
        self.stack.callback(setattr, owner, name, original)

    def observe(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call `before(memory, *args)`, and `after(memory, its value, *args)`.

        Only on threads of ranks.
        """

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def observed(*args: Any, **kwargs: Any) -> Any:
                memory = current()
                if memory is None:
                    return original(*args, **kwargs)
                seen = before(memory, *args, **kwargs) if before else None
                value = original(*args, **kwargs)
                if after:
                    after(memory, seen, *args, **kwargs)
                return value

            return observed

        self.replace(owner, name, make)

    def keep(self, handle: Any) -> None:
        """Remove a hook of torch's own when it is over."""
        self.stack.callback(handle.remove)
