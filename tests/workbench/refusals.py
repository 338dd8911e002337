"""Prepare texts for golden files: refusals, and screens full of figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    kind: type[BaseException], call: Callable[..., Any], *args: Any, **options: Any
) -> str:
    """Return the message of the error that `call` raises."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def without_figures(text: str) -> str:
    """Replace numbers and digests by `#`, and runs of spaces by one."""
    number = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
    lines = re.sub(
        rf"(?<![\w.])(?:{number}|[0-9a-f]{{8}})(?!\w)", "#", text
    ).splitlines()
    return "\n".join(re.sub(r" +", " ", line).rstrip() for line in lines)
