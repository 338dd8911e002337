"""Libraries that not everybody has: found, or named in one sentence."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install -e '.[tracking]'"


def needed(module: str, what: str) -> Any:
    """The module.

    Raises:
        ModuleNotFoundError: it, or one that it imports, is not installed; the sentence
            says what brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed: {INSTALL}"
        ) from error
