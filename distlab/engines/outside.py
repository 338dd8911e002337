"""Import an engine that you install separately, or say in one line how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from distlab.engines.expect import EngineError


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
