"""A course that came in a wheel: copied to an empty folder, and renewed later."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest

from distlab.cli import own_course as verbs
from distlab.cli.maintainer_verbs import bench, mutants, new_task, templates
from distlab.cli.own_course import own_course
from distlab.cli.update import update
from distlab.curriculum import (
    CurriculumError,
    Progress,
    fetched,
    find_root,
    installed_course,
    load_curriculum,
    manifest,
    progress,
)
from distlab.curriculum.fetched import RECORD, fetch_here, renew
from distlab.curriculum.pristine import template_files
from distlab.walkthroughs import folder as notebooks
from distlab.walkthroughs.folder import enter_course
from tests.workbench.course import EXCHANGE, FIRST, PHASES, ROOT, filled

NOTEBOOK = Path(PHASES[0]) / "walkthrough.ipynb"
GUIDE = Path(PHASES[0]) / "guide" / "collectives.md"
TEMPLATE = Path(PHASES[0]) / "template_collectives.py"
BEHIND, ALONE = Path(PHASES[1]) / "guidelines.md", Path("GLOSSARY.md")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The course among the libraries; the working folder is an empty one."""
    bundled = tmp_path / "libraries" / "distlab" / "course"
    for name in ("solutions", *PHASES):
        unwanted = shutil.ignore_patterns("template_*.py", "figures", "deployment")
        shutil.copytree(ROOT / name, bundled / name, ignore=unwanted)
    for name in ("curriculum.toml", "GLOSSARY.md"):
        shutil.copy(ROOT / name, bundled)
    for module in (manifest, progress, fetched, verbs, notebooks):
        monkeypatch.setattr(module, "BUNDLED", bundled)
    monkeypatch.delenv("DISTLAB_STATE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "mine" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    return bundled


def test_outside_of_a_course(wheel: Path, tmp_path: Path) -> None:
    assert find_root() == installed_course() == wheel
    assert Progress(wheel).folder == tmp_path / "home" / ".distlab"
    with pytest.raises(CurriculumError, match="distlab start"):
        own_course()
    add = partial(new_task, "1.99", "collectives.example")
    for verb in (templates, add, mutants, partial(bench, "sim")):
        with pytest.raises(CurriculumError, match="clone"):
            verb()
    Path("notes.txt").touch()
    with pytest.raises(CurriculumError, match=r"notes\.txt"):
        fetch_here()
    assert [path.name for path in Path.cwd().iterdir() if path.is_file()] == [
        "notes.txt"
    ]


def test_start_copies_the_course_and_makes_the_templates(wheel: Path) -> None:
    Path(".venv").mkdir()
    Path("env").mkdir()
    Path("env/pyvenv.cfg").touch()
    assert fetch_here() == Path.cwd()
    curriculum = own_course()
    assert curriculum.root == find_root() == Path.cwd()
    assert {file.state for file in template_files(curriculum)} == {"current"}
    for path in (NOTEBOOK, GUIDE, ALONE):
        assert path.read_bytes() == (wheel / path).read_bytes()
    assert Progress(curriculum.root).folder == Path.cwd() / ".distlab"
    assert fetch_here() is None  # a second time, there is nothing to do
    assert find_root(Path(PHASES[2]) / "guide") == Path.cwd()


def test_an_update_keeps_what_the_learner_wrote(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_here()
    mine = filled(FIRST, EXCHANGE)
    TEMPLATE.write_text(mine, encoding="utf-8")
    NOTEBOOK.write_text("my notes", encoding="utf-8")
    own = Path(PHASES[0]) / "test_collectives.py"
    own.write_text("# my tests", encoding="utf-8")
    BEHIND.unlink()
    # The next version: other texts, and a file less.
    for path in (NOTEBOOK, GUIDE):
        (wheel / path).write_text("newer", encoding="utf-8")
    (wheel / ALONE).unlink()
    solution = wheel / "solutions" / PHASES[0] / "collectives.py"
    text = solution.read_text(encoding="utf-8").replace("by hand", "by HAND", 1)
    solution.write_text(text, encoding="utf-8")

    assert update() == 0
    assert GUIDE.read_text() == NOTEBOOK.read_text() == "newer"
    assert [p.read_text() for p in NOTEBOOK.parent.glob("*.kept-*.ipynb")] == [
        "my notes"
    ]
    assert not list(GUIDE.parent.glob("*.kept-*"))
    assert own.read_text() == "# my tests"
    assert BEHIND.is_file()
    assert not ALONE.exists()
    assert EXCHANGE.strip().splitlines()[1].strip() in TEMPLATE.read_text()
    assert "by HAND" in TEMPLATE.read_text()
    assert [p.read_text() for p in TEMPLATE.parent.glob("*.kept-*.py")] == [mine]

    capsys.readouterr()
    assert update() == 0  # nothing is left to do, and nothing is kept twice
    assert len(list(Path.cwd().rglob("*.kept-*"))) == 2


def test_an_update_changes_nothing_while_a_file_is_no_python(wheel: Path) -> None:
    fetch_here()
    TEMPLATE.write_text("def broken(", encoding="utf-8")
    (wheel / GUIDE).write_text("newer", encoding="utf-8")
    with pytest.raises(ValueError, match=TEMPLATE.name):
        update()
    assert GUIDE.read_text() != "newer"


def test_without_a_record_everything_that_differs_is_kept(wheel: Path) -> None:
    fetch_here()
    GUIDE.write_text("mine?", encoding="utf-8")
    RECORD.unlink()
    assert renew(Path.cwd()).written == [GUIDE]
    assert [p.read_text() for p in GUIDE.parent.glob("*.kept-*.md")] == ["mine?"]


def test_a_course_of_another_version_is_named(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_here()
    record = json.loads(RECORD.read_text()) | {"version": "0.0.7"}
    RECORD.write_text(json.dumps(record))
    own_course()
    assert "0.0.7" in capsys.readouterr().err
    update()
    own_course()
    assert capsys.readouterr().err == ""


def test_a_clone_works_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", pytest.fail)
    monkeypatch.chdir(ROOT)
    assert own_course().root == ROOT


def test_the_wheel_brings_every_phase_and_all_data_of_distlab() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    options = build["build"]["targets"]["wheel"]
    assert "distlab" in options["only-include"]  # texts and tables too
    assert options["exclude"] == ["phase*/template_*.py"]
    for phase in load_curriculum(ROOT).phases:
        assert phase.folder in options["only-include"]
        assert options["sources"][phase.folder] == f"distlab/course/{phase.folder}"
        assert f"tests/test_phase{phase.number}.py" in options["only-include"]


# ── notebooks on their own ──────────────────────────────────────────────────────────


def first_code_cell(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    found = next(cell for cell in cells if cell["cell_type"] == "code")
    assert found["outputs"] == []
    return "".join(found["source"])


def test_all_notebooks_begin_alike() -> None:
    (cell,) = {first_code_cell(ROOT / name / "walkthrough.ipynb") for name in PHASES}
    assert "enter_course()" in cell
    exec(cell, {})  # in a course, it changes nothing
    assert find_root() == ROOT


@pytest.mark.parametrize("mounted", [True, False])
def test_a_notebook_in_colab_goes_to_the_drive(
    wheel: Path, tmp_path: Path, *, mounted: bool
) -> None:
    colab = tmp_path / "content"
    above = colab / "drive" / "MyDrive" if mounted else colab
    above.mkdir(parents=True)
    enter_course(colab)
    assert Path.cwd() == above / "distlab-course"
    assert (Path.cwd() / TEMPLATE).is_file()
    (Path.cwd() / TEMPLATE).write_text("# mine")
    os.chdir(tmp_path / "mine")
    enter_course(colab)  # the next session
    assert (Path.cwd() / TEMPLATE).read_text() == "# mine"
