"""The folder that the launcher puts first on the ranks' PYTHONPATH.

Python imports its sitecustomize.py before a rank's script, which attaches the step
monitor and the call recorder without changing the script.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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


def after_import(attached: Mapping[str, Callable[[Any], None]]) -> None:
    """Call a function with a module right after the script has imported it.

    `attached` maps names of modules to functions. A module that is already there gets
    its call now.
    """
    later = dict(attached)
    for name in [name for name in later if name in sys.modules]:
        later.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(later))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, attached: dict[str, Callable[[Any], None]]) -> None:
        self._attached = attached

    def find_spec(self, name: str, path: Sequence[str] | None, _: Any = None) -> Any:
        """Return the module's own spec, whose loader calls the function afterwards."""
        call = self._attached.pop(name, None)
        spec = importlib.util.find_spec(name) if call else None
        if call is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            call(module)

        loader.exec_module = exec_module
        return spec
