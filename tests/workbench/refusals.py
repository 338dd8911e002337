"""What a call is refused with, as text: for what it names, and for golden files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    kind: type[BaseException], call: Callable[..., Any], *args: Any, **options: Any
) -> str:
    """The message of the error of this kind with which `call` ends."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)
