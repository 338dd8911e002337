"""Keep track of this process's wrappers in the order of their construction.

The order is that of the program, so it is the same on every rank.
"""

from __future__ import annotations

import weakref

from torch import nn

_WRAPPERS: list[weakref.ref[nn.Module]] = []


def add(wrapper: nn.Module) -> None:
    """Register a wrapper for as long as the program holds it."""
    _WRAPPERS.append(weakref.ref(wrapper))


def alive() -> list[nn.Module]:
    """Return all wrappers that still exist."""
    found = [(reference, reference()) for reference in _WRAPPERS]
    _WRAPPERS[:] = [reference for reference, wrapper in found if wrapper is not None]
    return [wrapper for _, wrapper in found if wrapper is not None]
