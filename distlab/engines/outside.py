"""Engines in an environment of their own: found, or named in one line."""

from __future__ import annotations

import importlib
from typing import Any

from distlab.engines.expect import EngineError


def engine(module: str, extra: str, how: str = "") -> Any:
    """The module.

    Raises:
        EngineError: it is not installed; the line says `how`, or the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise EngineError(
            f"backend {extra} needs {missing}, which is not installed: "
            + (how or f"pip install -e '.[{extra}]'")
        ) from error
