"""Texts for golden files: what a call is refused with, and screens full of figures."""

from __future__ import annotations

import re
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


def without_figures(text: str) -> str:
    """`text` with `#` for numbers and digests, one space where there may be several."""
    number = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
    lines = re.sub(
        rf"(?<![\w.])(?:{number}|[0-9a-f]{{8}})(?!\w)", "#", text
    ).splitlines()
    return "\n".join(re.sub(r" +", " ", line).rstrip() for line in lines)
