"""A unit's text with its code, on its way to ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.curriculum.compiled import received, sent
from distlab.curriculum.units import SourceError, UnitSource, travelling


def a_unit(text: str) -> UnitSource:
    return UnitSource("ring", "mine", Path("/somewhere/ring.py"), text, "builds")


def test_what_is_received_is_what_was_sent() -> None:
    source = a_unit("def add(a, b):\n    return a + b\n")
    there = received(sent(source))
    assert there == source
    assert vars(there)["code"] == source.code  # it need not be compiled
    assert there.code.co_filename == "/somewhere/ring.py"


def test_a_text_that_is_not_python_fails_where_it_is_loaded() -> None:
    there = received(sent(a_unit("def add(:\n")))
    with pytest.raises(SourceError) as caught:
        _ = there.code
    assert (caught.value.line, caught.value.is_syntax) == (1, True)


def test_a_text_may_come_without_code() -> None:
    source = a_unit("x = 1\n")
    assert received(travelling(source)).code == source.code
