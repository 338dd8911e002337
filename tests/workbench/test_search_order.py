"""Files of the learner's with a library's name: they stand in for nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distlab.search_order import put_last
from tests.workbench.course import EXCHANGE, FIRST, Course

SHADOW = " of the learner"
NAMES = ("random", "copy", "selectors", "typing", "json", "signal", "numpy", "typer")


def test_the_working_folder_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, root = tmp_path / "here", tmp_path / "root"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(root), "/lib", str(here), "/more"])
    put_last(str(root))
    assert sys.path == ["/lib", "/more", str(here), str(root)]
    put_last()
    assert sys.path == ["/lib", "/more", str(root), str(here)]


@pytest.fixture
def shadows(here: Course) -> Course:
    """The course, with files in its folder that would break every import."""
    for name in NAMES:
        (here.root / f"{name}.py").write_text(f"print('{name}{SHADOW}')\n")
    (here.root / "torch").mkdir()
    (here.root / "torch" / "__init__.py").write_text(f"print('torch{SHADOW}')\n")
    here.fill(FIRST, EXCHANGE)
    return here


@pytest.mark.slow
def test_a_check_uses_the_libraries(shadows: Course) -> None:
    done = shadows.distlab("check", "1.1")
    assert done.code == 0, done.said
    assert done.out.startswith("1.1 PASS")
    assert SHADOW not in done.said


@pytest.mark.slow
def test_so_do_the_phase_tests(shadows: Course) -> None:
    done = shadows.python(
        *("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("tests/test_phase1.py", "-k", FIRST),
    )
    assert done.code == 0, done.said
