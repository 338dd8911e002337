"""Attach the monitor and the recorder; Python imports this before a rank's script.

If there is another sitecustomize, it runs as well.

Source: docs.python.org/3/library/site.html, sitecustomize.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_other() -> None:
    others = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _attach() -> None:
    if importlib.util.find_spec("distlab") is None:
        sys.path.append(str(_HERE.parents[1]))
    for name in filter(None, os.environ.get("DISTLAB_ATTACH", "").split(",")):
        importlib.import_module(name).attach()


_attach()
_run_other()
