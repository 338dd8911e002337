"""torchvision beside a torch for CPUs: with the two operators that it then lacks.

Wheels of torchvision bring compiled operators that fit another build of torch. Without
them `import torchvision` fails where it describes nms and qnms, which detection models
use, and no transform. So both are declared, without an implementation.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_declared: list[torch.library.Library] = []


def torchvision(name: str = "torchvision") -> ModuleType:
    """A module of torchvision.

    Raises:
        ImportError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor a, Tensor b, float most) -> Tensor")
        _declared.append(library)
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        raise ImportError(f"torchvision does not import: {error}") from error
