"""A file that cannot be read is named, and once only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cli.drill import drill
from distlab.cli.update import update
from distlab.curriculum import SourceError
from distlab.training.digits import DigitsConfig, train_on_ranks
from distlab.training.mesh_code import choose_units
from tests.workbench.course import Course
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

GONE = os.strerror(errno.ENOENT)


def drilled(code: str) -> None:
    drill(seed=0, code=code, as_json=True)


def trained(code: str) -> None:
    """What `distlab demo` does, on a cluster that starts nothing."""
    cluster: Any = SimpleNamespace(warm=lambda *modules: None, run=None)
    train_on_ranks(cluster, DigitsConfig(code=code))


def meshed(code: str) -> None:
    choose_units(code)


@pytest.mark.parametrize("read", [drilled, trained, meshed])
def test_a_file_that_is_not_there_is_named(
    read: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        read("nosuch.py")
    message = str(caught.value)
    assert message.startswith("nosuch.py: ")
    assert message.endswith(GONE)
    assert message.count("nosuch.py") == 1
    assert caught.value.path == tmp_path / "nosuch.py"


@pytest.mark.parametrize("read", [drilled, meshed])
def test_a_file_that_is_no_python_is_named_with_its_line(
    read: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(SourceError, match=r"^broken\.py: ") as said:
        read("broken.py")
    assert (said.value.line, said.value.is_syntax) == (2, True)


def test_how_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("x = 1\ndef f(:\n")
    Path("bytes.py").write_bytes(b"\xe9")
    files = ("nosuch.py", "broken.py", "bytes.py")
    told = [refusal(SourceError, meshed, name) for name in files]
    golden("curriculum/files-that-cannot-be-read", "\n".join(told))


def test_a_template_that_is_no_text_is_named_once(here: Course) -> None:
    path = here.template()
    path.write_bytes(b"# \xe9t\xe9\n")
    with pytest.raises(SourceError) as caught:
        update("collectives")
    shown = path.relative_to(here.root)
    message = str(caught.value)
    assert message.startswith(f"{shown}: ")
    assert message.count(path.name) == 1
    assert "UTF-8" in message
    assert path.read_bytes() == b"# \xe9t\xe9\n"
