"""Engines that you install separately: import them, and run processes of theirs.

If one isn't installed, the error says in one line how to get it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

from distlab.engines.expect import EngineError

GRACE_S = 10.0  # from SIGTERM to SIGKILL


def engine(module: str, name: str, install: str = "") -> Any:
    """Import a module that the backend `name` needs.

    Raises:
        EngineError: it isn't installed; the message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise not_installed(missing, name, install) from error


def not_installed(module: str, name: str, install: str = "") -> EngineError:
    """Return the error for a module that the backend `name` needs and doesn't have."""
    how = install or f"pip install -e '.[{name}]'"
    return EngineError(f"backend {name} needs {module}, which is not installed: {how}")


def environment_of_ranks() -> dict[str, str]:
    """Return the environment for ranks that an engine starts on this machine.

    They can import the same modules as this process. Because there are several of
    them, each uses one thread, as under torchrun.
    """
    folders = os.pathsep.join(map(os.path.abspath, sys.path))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": folders}


def end(process: subprocess.Popen[Any]) -> None:
    """End a process: ask it to, and kill it if it takes too long."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
