"""Files of the learner's with a library's name: they stand in for nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.search_order import put_last
from tests.workbench.course import EXCHANGE, FIRST, Course

SHADOW = " of the learner"
NAMES = ("random", "copy", "selectors", "typing", "json", "signal", "numpy", "typer")
OPTIONAL = (
    "cuda",
    "triton",
    "onnx",
    "mlflow",
)  # not installed, and torch asks for some


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
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A learner's absent_one.py, and a library that asks for it in three ways."""
    here, library = tmp_path / "here", tmp_path / "site-packages"
    for folder in (here, library):
        folder.mkdir()
    (here / "absent_one.py").write_text("OWNER = 'learner'\n")
    ask = "import absent_one", "importlib.import_module('absent_one')"
    for name, statement in zip(("states", "calls"), ask, strict=True):
        text = f"import importlib\n\ndef ask():\n    {statement}\n"
        (library / f"library_{name}.py").write_text(text)
        (here / f"own_{name}.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path, str(library)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    put_last()
    yield library
    for name in ("absent_one", "library_states", "library_calls"):
        sys.modules.pop(name, None)
    for name in ("own_states", "own_calls"):
        sys.modules.pop(name, None)


def test_a_library_never_finds_a_file_of_the_learners(asked: Path) -> None:
    for name in ("library_states", "library_calls"):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(name).ask()
        assert caught.value.name == "absent_one"
    for name in ("own_states", "own_calls"):
        importlib.import_module(name).ask()
        assert sys.modules.pop("absent_one").OWNER == "learner"

    # what is installed is found, as before
    (asked / "absent_one.py").write_text("OWNER = 'library'\n")
    importlib.invalidate_caches()
    importlib.import_module("library_states").ask()
    assert sys.modules["absent_one"].OWNER == "library"


@pytest.fixture
def shadows(here: Course) -> Course:
    """The course, with files in its folder that would break every import."""
    for name in NAMES:
        (here.root / f"{name}.py").write_text(f"print('{name}{SHADOW}')\n")
    for name in OPTIONAL:  # it breaks whoever imports it while torch is imported
        lines = "import torch", "torch.nn", f"print('{name}{SHADOW}')", ""
        (here.root / f"{name}.py").write_text("\n".join(lines))
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
