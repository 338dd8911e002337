"""Libraries that need a change on simulated ranks, made as soon as a rank imports them.

Ranks share installed packages, because to load one takes seconds. Some keep a state per
process that must not be shared, and some can't work here at all:

    FSDP 1's profiler     what is being timed, in attributes of its class
    accelerate            who and where it is, in a dict that a class's instances share
    lightning_utilities   the rank, as an attribute of `rank_zero_only`
    torch's C++ sources   compiled at run time: refused

A package that keeps much more of its state in its modules, such as hydra, is loaded per
rank instead (see belongings).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from distlab.attached import after_import
from distlab.sim.torch.rank import here
from distlab.sim.torch.replacing import Replaced


@contextmanager
def adapted() -> Iterator[None]:
    """While it lasts, these libraries work on simulated ranks."""
    replaced = Replaced()
    adapt = {name: partial(adapt, replaced=replaced) for name, adapt in _ADAPT.items()}
    stop = after_import(adapt)
    try:
        yield
    finally:
        stop()
        replaced.undo()


# ── each library ────────────────────────────────────────────────────────────────────


class _PerRank:
    """A class's attribute, of which each rank's thread has its own, made by `make`."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make, self._local = make, threading.local()

    def __get__(self, instance: object, owner: object = None) -> Any:
        own = vars(self._local)
        if not own:
            own["value"] = self._make()
        return own["value"]


def _accelerate(module: Any, replaced: Replaced) -> None:
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        owner = getattr(module, name, None)
        if owner is not None:
            replaced.put(owner, "_shared_state", _PerRank(dict))


class _RankZeroOnly:
    """The decorator, with the rank of the thread that asks."""

    def __init__(self, original: Callable[..., Any]) -> None:
        update_wrapper(self, original, updated=())
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    @property
    def rank(self) -> Any:
        """The rank in the world; what the library was told, outside of ranks."""
        mine = here()
        return getattr(self._original, "rank", None) if mine is None else mine.number

    @rank.setter
    def rank(self, rank: int) -> None:
        if here() is None:
            self._original.rank = rank  # type: ignore[attr-defined]


def _lightning(module: Any, replaced: Replaced) -> None:
    replaced.put(module, "rank_zero_only", _RankZeroOnly(module.rank_zero_only))


def _fsdp_profiler(module: Any, replaced: Replaced) -> None:
    for name, make in (("profiling", set), ("results", partial(defaultdict, float))):
        replaced.put(module.SimpleProfiler, name, _PerRank(make))


def _cpp_extension(module: Any, replaced: Replaced) -> None:
    for name in ("load", "load_inline"):
        replaced.refuse(
            module,
            name,
            f"torch.utils.cpp_extension.{name}",
            "no kernels of your own run here. Choose a path of the script without them",
        )


_ADAPT: dict[str, Callable[..., None]] = {
    "accelerate.state": _accelerate,
    "lightning_utilities.core.rank_zero": _lightning,
    "torch.distributed.fsdp._debug_utils": _fsdp_profiler,
    "torch.utils.cpp_extension": _cpp_extension,
}
