"""Import an engine that you install separately, or say in one line how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from distlab.engines.expect import EngineError


def engine(module: str, extra: str, how: str = "") -> Any:
    """Import the engine's module.

    Raises:
        EngineError: the engine isn't installed; the message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise EngineError(
            f"backend {extra} needs {missing}, which is not installed: "
            + (how or f"pip install -e '.[{extra}]'")
        ) from error
