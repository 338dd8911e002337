"""The folder that the launcher puts first on the ranks' PYTHONPATH.

Python imports its sitecustomize.py before a rank's script, which attaches the step
monitor and the call recorder without changing the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

MODULES = "DISTLAB_ATTACH"
"""In a rank's environment: modules whose `attach()` runs before the script."""


def variables(module: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which `module.attach()` runs before the script."""
    own = str(Path(__file__).parent)
    paths = inherited.get("PYTHONPATH", "").split(os.pathsep)
    modules = inherited.get(MODULES, "").split(",")
    return {
        "PYTHONPATH": os.pathsep.join([own, *(p for p in paths if p and p != own)]),
        MODULES: ",".join(dict.fromkeys([*filter(None, modules), module])),
    }


def after_import(attached: Mapping[str, Callable[[Any], None]]) -> Callable[[], None]:
    """Call a function with a module right after the script has imported it.

    `attached` maps names of modules to functions. A module that is already there gets
    its call now. Returns a function after which no module gets one any more.
    """
    finder = _Finder(attached)
    for name in attached:
        if name in sys.modules:
            attached[name](sys.modules[name])
    sys.meta_path.insert(0, finder)
    return partial(sys.meta_path.remove, finder)


def found_by_others(
    finder: Any, name: str, path: Sequence[str] | None, target: Any
) -> ModuleSpec | None:
    """Return what the first other finder finds, whichever place `finder` has."""
    others = (other for other in sys.meta_path if other is not finder)
    # Python too skips what has only the old find_module.
    ask = (other.find_spec for other in others if hasattr(other, "find_spec"))
    found = (find(name, path, target) for find in ask)
    return next((spec for spec in found if spec is not None), None)


class _Finder:
    """Finds modules where others find them, and gives them their call once loaded.

    It doesn't look for them ahead, because some take long to import.
    """

    def __init__(self, attached: Mapping[str, Callable[[Any], None]]) -> None:
        self._attached = attached
        self._asked: set[str] = set()  # others ask everybody in turn, us too

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        call = self._attached.get(name)
        if call is None or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = found_by_others(self, name, path, target)
        finally:
            self._asked.discard(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            call(module)

        loader.exec_module = exec_module
        return spec
