"""What a marked test asks for: its ranks, its body by name, and its arguments.

A rank is another process. It imports the test's module by itself and gets the arguments
as a pickle, so an argument that can't be pickled is refused.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import unittest
import warnings
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from distlab.pytest_plugin import MARK, THIS_RANK

MAX_RANKS = 64
_OPTIONS = ("simulated", "timeout")
_TRACEBACKS = {"auto": "long", "no": "line"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The marker's arguments. `timeout_s` is the last resort."""

    world_size: int
    simulated: bool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class RankedTest:
    """A test's body and its surroundings, as plain data that every process can read.

    `values` is a pickle of the instance of the test's class (or None), the arguments
    and the filters for warnings. It's read once the module is imported.
    """

    module: str
    file: str
    function: str
    values: bytes
    rank_names: tuple[str, ...]
    """The arguments that are the rank's number."""
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    folder: str
    rewrites: bool
    """Rewrite the module's asserts, as pytest does."""
    traceback: str
    shows_locals: bool


def refuse_kind(item: pytest.Item) -> None:
    """Fail unless the test is a plain function or method."""
    why = ""
    owner = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function):
        why = "isn't a function"
    elif owner is not None and issubclass(owner, unittest.TestCase):
        why = "is a method of a unittest.TestCase: make it a function"
    elif inspect.iscoroutinefunction(item.obj):
        why = "is a coroutine: make it a plain function"
    if why:
        _fail(f"a test marked {MARK} is called on the ranks, but {item.name} {why}")


def wanted(marker: pytest.Mark, timeout: str) -> Setting:
    """Read the marker; `timeout` is the setting for tests that don't have their own."""
    unknown = marker.kwargs.keys() - set(_OPTIONS)
    (n, *more), options = marker.args or (None,), marker.kwargs
    if unknown or more or not isinstance(n, int) or isinstance(n, bool):
        _fail(
            f"{_written(marker)}: write it as ranks(4), ranks(4, simulated=True) or "
            "ranks(4, timeout=60)"
        )
    simulated = bool(options.get("simulated", False))
    most = 4096 if simulated else MAX_RANKS
    if not 1 <= n <= most:
        _fail(f"{_written(marker)}: choose between 1 and {most} ranks")
    given = options.get("timeout")
    try:
        timeout_s = float(timeout if given is None else given)
    except (TypeError, ValueError):
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        told = timeout if given is None else given
        _fail(f"{_written(marker)}: the timeout is {told!r}, must be seconds, above 0")
    return Setting(world_size=n, simulated=simulated, timeout_s=timeout_s)


def job_of(item: pytest.Function) -> RankedTest:
    """Describe the test's body so that another process can call it."""
    values = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    rank_names = tuple(name for name, value in values.items() if value is THIS_RANK)
    values = {name: v for name, v in values.items() if v is not THIS_RANK}
    for name, value in values.items():
        _require_picklable(f"the argument {name!r}", value)
    _require_picklable("the test's object", item.instance)
    option = item.config.option
    return RankedTest(
        module=item.module.__name__,
        file=str(item.path),
        function=item.originalname,
        values=cloudpickle.dumps((item.instance, values, _filters())),
        rank_names=rank_names,
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        folder=os.getcwd(),
        rewrites=option.assertmode == "rewrite",
        traceback=_TRACEBACKS.get(option.tbstyle, option.tbstyle),
        shows_locals=bool(option.showlocals),
    )


def _filters() -> list[Any]:
    try:
        cloudpickle.dumps(warnings.filters)
    except Exception:  # a category of a module that can't be imported
        return []
    return list(warnings.filters)


def _require_picklable(what: str, value: Any) -> None:
    kind = type(value)
    is_pytests = kind.__module__.partition(".")[0] in ("_pytest", "pytest")
    why = "it belongs to pytest's own process"
    if not is_pytests or isinstance(value, os.PathLike):
        try:
            cloudpickle.dumps(value)
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    _fail(
        f"{what} ({kind.__name__}) can't be sent to the ranks, which are other "
        f"processes ({why}); make it in the test's body"
    )


def _written(marker: pytest.Mark) -> str:
    told = [*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())]
    return f"ranks({', '.join(told)})"


def _fail(text: str) -> None:
    pytest.fail(text, pytrace=False)
