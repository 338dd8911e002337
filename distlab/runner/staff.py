"""What travels to the zygote of a run's program and services: names, no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ServiceSpec = Callable[..., Any] | tuple[Any, ...]
"""A function that makes a service, or a tuple of it and its further arguments."""
MAX_SERVICES = 16
_TAKEN = ("store",)


def describe(services: Mapping[str, ServiceSpec]) -> list[dict[str, Any]]:
    """The services of a run as plain data.

    Raises:
        ValueError: a name that means something else, too many of them, or a function
            that other processes cannot import.
    """
    if len(services) > MAX_SERVICES:
        raise ValueError(f"{len(services)} services, more than {MAX_SERVICES}")
    described = []
    for name, spec in services.items():
        if not name or name in _TAKEN or name.startswith("rank "):
            raise ValueError(f"no service can be called {name!r}")
        make, *args = spec if isinstance(spec, tuple) else (spec,)
        described.append(
            {"name": name, "factory": importable_name(make), "args": list(args)}
        )
    return described


def importable_name(program: Callable[..., Any]) -> str:
    """What other processes find a function by.

    Raises:
        ValueError: they cannot.
    """
    module = getattr(program, "__module__", None)
    name = getattr(program, "__qualname__", "<a lambda>")
    if module in (None, "__main__") or not name.isidentifier():
        raise ValueError(
            f"{name} cannot run on ranks: they import the program by name, so it must "
            "be a function at the top of a module"
        )
    return f"{module}:{name}"
