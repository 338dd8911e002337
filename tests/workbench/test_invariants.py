"""What must hold of the curriculum as a whole.

Templates are generated here, into temporary folders: what stands in the phase folders
is the learner's, and a learner's edits are never an error.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.cli.check import check
from distlab.curriculum import (
    Curriculum,
    Task,
    load_curriculum,
    make_template,
)
from distlab.curriculum.clauses import fill_docstrings, fill_guide
from distlab.curriculum.manifest import CurriculumError
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.pristine import reworded
from distlab.curriculum.regions import find_regions, functions_of
from distlab.curriculum.units import UnitSource
from distlab.grading import TaskVerdict
from distlab.grading.clause import checks_of
from distlab.grading.grade import Grader
from distlab.runner import Cluster
from tests.workbench.judging import (
    CURRICULUM,
    ROOT,
    SEED,
    UNITS,
    catalogue,
    solution_of,
    verdict_on,
    with_body,
    with_hole,
)

TASKS = CURRICULUM.tasks

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)

Judged = Callable[..., TaskVerdict]


@pytest.fixture
def judged(tmp_path: Path, cluster: Cluster) -> Judged:
    return functools.partial(verdict_on, cluster, tmp_path)


@pytest.fixture
def clone(tmp_path: Path) -> Curriculum:
    """A fresh clone: manifest, solutions, and templates that nobody has touched."""
    shutil.copy(ROOT / "curriculum.toml", tmp_path)
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    for unit in UNITS.values():
        path = unit.template(tmp_path)
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_template(solution_of(unit.name)), encoding="utf-8")
    return load_curriculum(tmp_path)


def functions_of_task(task: Task) -> tuple[str, ...]:
    return functions_of(solution_of(task.unit))[task.id]


# ── solutions, templates, and what is in between ────────────────────────────────────


# One of each unit. All, at every size: `distlab check --phase N --code reference`.
FIRST = {task.unit: task for task in reversed(TASKS)}


def first_sizes(task: Task) -> tuple[int, ...]:
    """Of each clause the number of ranks that tells most."""
    return tuple({check.worlds[0]: None for check in checks_of(task.id)})


@pytest.mark.parametrize("task", FIRST.values(), ids=lambda task: task.id)
def test_solutions_pass(task: Task, cluster: Cluster) -> None:
    grader = Grader(CURRICULUM, cluster, code="reference", seed=SEED, worlds=(3,))
    report = grader.grade([task])
    assert report.tasks[0].status == "pass", report.tasks[0].message
    assert report.exit_code == 0
    assert set(report.tasks[0].world_sizes) == {3} or task.kind == "plan"


def test_a_pristine_template_is_not_started(
    clone: Curriculum, cluster: Cluster
) -> None:
    report = Grader(clone, cluster, seed=SEED).grade(clone.tasks)
    assert report.exit_code == 10
    for verdict in report.tasks:
        assert (verdict.status, verdict.slug) == ("not_started", "not-started")
        path = clone.units[verdict.id.partition(".")[0]].template(clone.root)
        line = path.read_text(encoding="utf-8").splitlines()[verdict.line - 1]
        assert line.strip() == f'raise NotImplementedError("{verdict.id}")'


@pytest.mark.parametrize("phase", [phase.number for phase in CURRICULUM.phases])
def test_the_command_says_so_too_without_starting_a_rank(
    phase: int,
    clone: Curriculum,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing here needs a rank")

    monkeypatch.chdir(clone.root)
    monkeypatch.setattr(Cluster, "_spawn", never)
    assert check([], phase=phase, as_json=True) == 10
    report = json.loads(capsys.readouterr().out)
    assert {task["status"] for task in report["tasks"]} == {"not_started"}
    units = {unit.name for unit in clone.phase(phase).units}
    expected = [task.id for task in TASKS if task.unit in units]
    assert [task["id"] for task in report["tasks"]] == expected


def state_in(source: UnitSource, task: Task) -> str:
    return source.state_of(task.id, functions_of_task(task))[0]


@each_task
def test_a_hole_is_its_own_task_only(task: Task, judged: Judged) -> None:
    text = with_hole(solution_of(task.unit), task.id)
    assert text.count("raise NotImplementedError") == len(functions_of_task(task))
    assert judged(task.id, text).status == "not_started"
    source = UnitSource(task.unit, "mine", Path("template.py"), text)
    for other in UNITS[task.unit].tasks:
        assert (state_in(source, other) == "started") == (other != task)


def test_a_no_op_is_a_start() -> None:
    for task in TASKS:
        for function in functions_of_task(task):
            for body in ("pass", "return None"):
                text = with_body(solution_of(task.unit), task.id, body, function)
                source = UnitSource(task.unit, "mine", Path("template.py"), text)
                assert state_in(source, task) == "started", (task.id, function)


@pytest.mark.slow
@each_task
def test_a_no_op_is_a_failure_not_a_crash(task: Task, judged: Judged) -> None:
    function = functions_of_task(task)[-1]
    text = with_body(solution_of(task.unit), task.id, "pass", function)
    verdict = judged(task.id, text, worlds=first_sizes(task), exit_code=1)
    assert verdict.status == "fail", function
    assert verdict.first_failure() is not None
    assert verdict.message


WITH_SIBLINGS = [task for task in TASKS if len(UNITS[task.unit].tasks) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("task", WITH_SIBLINGS, ids=lambda task: task.id)
def test_a_task_passes_while_its_siblings_are_unfinished(
    task: Task, judged: Judged
) -> None:
    text = make_template(solution_of(task.unit))
    solution = solution_of(task.unit)
    lines = solution.splitlines(keepends=True)
    regions = [r for r in find_regions(solution) if r.id == task.id]
    bodies = iter("".join(lines[r.first : r.last - 1]) for r in regions)
    hole = re.compile(
        rf'^ *# TODO\({re.escape(task.id)}\)\n(?: *#.*\n)* *raise .*"\)\n', re.M
    )
    filled, count = hole.subn(lambda _: next(bodies), text)
    assert count == len(regions)
    left = len(find_regions(solution)) - len(regions)
    assert filled.count("raise NotImplementedError") == left
    assert judged(task.id, filled, worlds=first_sizes(task)).status == "pass"


# ── the manifest ────────────────────────────────────────────────────────────────────


def test_regions_and_manifest_name_the_same_tasks() -> None:
    for name, unit in UNITS.items():
        regions = [region.id for region in find_regions(solution_of(name))]
        assert list(dict.fromkeys(regions)) == [task.id for task in unit.tasks]
        assert all(region.prompts for region in find_regions(solution_of(name)))


@each_task
def test_every_clause_is_checked_and_stands_in_the_docstring(task: Task) -> None:
    assert {check.clause for check in checks_of(task.id)} == set(task.clauses)
    names = {part for name in functions_of_task(task) for part in name.split(".")}
    docstring = "\n".join(
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(solution_of(task.unit)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    )
    for clause in task.clauses:
        assert re.search(rf"\b{clause} \S", docstring), clause
    named = rf"distlab check (\d+\.\d+, )*{re.escape(task.number)}\b"
    assert re.search(named, docstring)


def test_needs_come_first_and_are_tasks() -> None:
    seen: set[str] = set()
    for task in TASKS:
        assert set(task.needs) <= seen, task.id
        seen.add(task.id)


def test_the_units_of_a_phase_stand_in_the_order_of_the_path() -> None:
    for phase in CURRICULUM.phases:
        on_the_path = dict.fromkeys(t.unit for t in CURRICULUM.tasks_of(phase.number))
        assert [unit.name for unit in phase.units] == list(on_the_path)


def test_every_diagnosis_is_explained_and_every_explanation_is_tried() -> None:
    sources = [*(ROOT / "distlab" / "grading").rglob("*.py")]
    named = {
        value.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "slug"
        for value in ast.walk(node.value)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    known = set(read_misconceptions())
    assert named - {""} <= known
    tried = {entry.slug for entry in catalogue().values()}
    about_the_file = {"not-started", "renamed", "syntax-error"}
    not_yet_to_be_had = {"wrong-shape"}
    not_a_mistake_of_one_task = {"deadlock"}
    untried = about_the_file | not_yet_to_be_had | not_a_mistake_of_one_task
    assert known - tried == untried


def test_the_manifest_is_toml_that_any_reader_can_use() -> None:
    data = tomllib.loads((ROOT / "curriculum.toml").read_text(encoding="utf-8"))
    numbers = [phase["number"] for phase in data["phase"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_docstrings_and_guides_word_each_clause_as_the_manifest_does() -> None:
    assert reworded(CURRICULUM) == {}


def test_a_clause_is_worded_anew_in_a_docstring_and_in_a_guide() -> None:
    unit = CURRICULUM.units["collectives"]
    wording = unit.tasks[0].clauses["C1"]
    source = solution_of("collectives")
    assert wording in source
    other = source.replace(wording, "Another\n       wording of it.", 1)
    assert fill_docstrings(other, unit) == source
    unknown = source.replace("C1 ", "C9 ", 1)
    with pytest.raises(CurriculumError, match="C9"):
        fill_docstrings(unknown, unit)
    page = unit.guide(ROOT).read_text()
    assert fill_guide(page.replace(wording, "another wording"), unit) == page
