"""Import optional libraries, or say in one sentence which one is missing."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install -e '.[tracking]'"


def needed(module: str, what: str) -> Any:
    """Import a module and return it.

    Raises:
        ModuleNotFoundError: the module, or one that it imports, isn't installed; the
            message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed: {INSTALL}"
        ) from error
