"""`distlab new-task`: stubs that work together, and a list of what is left to write."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.curriculum import Curriculum, CurriculumError, find_root, load_curriculum
from distlab.curriculum.hints import LEVELS, read_hints
from distlab.curriculum.pristine import reworded, template_files
from distlab.curriculum.regions import functions_of
from distlab.grading.catalogue import FOLDER, RECORDS, STRESSORS, read_catalogue
from distlab.grading.new_task import MINUTES, create, left_to_do

ROOT = find_root(Path(__file__))
COURSE = load_curriculum(ROOT)
NUMBER, UNIT, NAME = "3.99", "topology", "ring_order"
ID = f"{UNIT}.{NAME}"
SUMS = r"^\| \*\*.*\*\* \| \| (\d+) \| (\d+) \|$"


@pytest.fixture
def course(tmp_path: Path) -> Curriculum:
    """A copy of the files that belong to tasks."""
    phases = [phase.folder for phase in COURSE.phases]
    code = ["solutions", "distlab/curriculum", "distlab/grading/checks"]
    for folder in (*phases, *code, str(RECORDS)):
        copy(folder, tmp_path)
    for name in ("curriculum.toml", "pyproject.toml", "README.md", "docs/contents.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return load_curriculum(tmp_path)


def copy(folder: str | Path, to: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / folder, to / folder, ignore=ignored, dirs_exist_ok=True)


def texts(root: Path) -> dict[Path, str]:
    return {
        path: path.read_text(encoding="utf-8")
        for suffix in ("toml", "md", "py")
        for path in root.rglob(f"*.{suffix}")
    }


def test_a_new_task_has_a_stub_in_every_file(course: Curriculum) -> None:
    root, before = course.root, texts(course.root)
    create(course, NUMBER, ID)
    new = load_curriculum(root)
    task = new.task(ID)
    assert [t for t in new.tasks if t != task] == [*course.tasks]
    assert new.tasks_of(3)[-1] == task
    assert (task.number, task.needs) == (NUMBER, (course.units[UNIT].tasks[-1].id,))
    assert list(read_hints(new, task)) == [*range(1, len(LEVELS) + 1)]
    assert functions_of(new.units[UNIT].solution(root).read_text())[ID] == (NAME,)
    assert f"\n### {NUMBER} {ID}\n" in new.units[UNIT].guide(root).read_text()
    entries = [entry for entry in read_catalogue(new) if entry.task == ID]
    assert [entry.is_mutant for entry in entries] == [True, True, False]
    assert {file.state for file in template_files(new)} == {"current", "outdated"}
    assert texts(root).keys() - before.keys() == {
        root / "distlab" / "grading" / "checks" / UNIT / f"{NAME}.py",
        root / FOLDER / UNIT / f"{NAME}.toml",
    }


def test_the_tables_of_tasks_come_from_the_manifest(course: Curriculum) -> None:
    assert reworded(course) == {}
    create(course, NUMBER, ID)
    new, root = load_curriculum(course.root), course.root
    filled = reworded(new)
    folder = root / new.phase(3).folder
    page = new.units[UNIT].guide(root)
    contents, readme = root / "docs" / "contents.md", root / "README.md"
    solution = new.units[UNIT].solution(root)
    assert filled.keys() == {folder / "guidelines.md", page, contents, readme, solution}
    sums = re.findall(SUMS, filled[folder / "guidelines.md"], re.MULTILINE)
    before = re.findall(SUMS, (folder / "guidelines.md").read_text(), re.MULTILINE)
    grown = [int(b) - int(a) for (a, _), (b, _) in zip(before, sums, strict=True)]
    assert grown == [MINUTES, MINUTES]
    rows = re.findall(
        r"^\| (3\.\d+) \[", filled[folder / "guidelines.md"], re.MULTILINE
    )
    assert rows == [task.number for task in new.tasks_of(3)]
    minutes = sum(task.minutes for task in new.units[UNIT].tasks if not task.stretch)
    row = rf"^\| 3\.6–3\.8, {NUMBER} \| `{UNIT}`.* \| {minutes} \|$"
    assert re.search(row, filled[contents], re.MULTILINE)
    assert filled[readme].count(f" {len(new.tasks)} ") == 2


def test_what_is_left_is_listed_until_it_is_done(course: Curriculum) -> None:
    create(course, NUMBER, ID)
    new = load_curriculum(course.root)
    task = new.task(ID)
    left = left_to_do(new, task)
    assert len(left) == len(set(left))
    stressors = next(line for line in left if line.startswith(f"{RECORDS}/stressors"))
    assert all(name in stressors for name in STRESSORS)
    for path in {line.partition(":")[0] for line in left if line.count(":") > 1}:
        if (file := course.root / path).is_file():
            file.write_text(file.read_text().replace("TODO:", "Done:"))
    with (course.root / RECORDS / "stressors.toml").open("a") as excuses:
        named = ", ".join(f'"{name}"' for name in STRESSORS)
        excuses.write(
            f'[[excused]]\ntasks = ["{ID}"]\nstressors = [{named}]\nwhy = "."'
        )
    again = left_to_do(load_curriculum(course.root), task)
    assert [line.partition(":")[0] for line in again[:-1]] == [
        f"{FOLDER}/{UNIT}/{NAME}.toml"
    ]


def test_what_cannot_be_a_task_is_refused_and_nothing_written(
    course: Curriculum,
) -> None:
    before = texts(course.root)
    for number, task_id in (
        (NUMBER, "no_such.task"),
        (NUMBER, UNIT),
        (NUMBER, f"{UNIT}.Order"),
        (NUMBER, f"{UNIT}.choose"),  # a task
        (NUMBER, f"{UNIT}.estimate_time"),  # a function
        ("2.99", ID),  # another phase
        ("3.8", ID),  # another task's
    ):
        with pytest.raises(CurriculumError):
            create(course, number, task_id)
    assert texts(course.root) == before


@pytest.mark.slow
def test_the_stubs_can_be_graded_as_they_are(course: Curriculum) -> None:
    def distlab(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "distlab", *arguments],
            cwd=course.root,
            env={"PYTHONPATH": str(course.root), "DISTLAB_STATE": str(course.root)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    copy("distlab", course.root)
    assert distlab("new-task", NUMBER, ID).returncode == 0
    said = distlab("new-task", NUMBER, ID)  # a second time it only lists what is left
    assert (said.returncode, "TODO" in said.stdout) == (0, False)
    assert distlab("templates", "--check").returncode == 0
    assert distlab("check", NUMBER, "--code", "reference").returncode == 0
    assert distlab("mutants", "--only", ID).returncode == 0
