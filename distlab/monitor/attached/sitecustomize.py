"""Python imports this before a rank's script: it attaches the monitor to torch.

If there is another sitecustomize, it runs too.

Source: docs.python.org/3/library/site.html, sitecustomize.
"""

import importlib.machinery
import importlib.util
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
        sys.path.append(str(_HERE.parents[2]))
    from distlab.monitor.attach import attach

    attach()


_attach()
_run_other()
