"""`distlab score-test UNIT`: write tests for a unit, and see which mistakes they catch.

The wrong and right solutions are those of the catalogue that the grader is tested with.
If no test catches a wrong one, you see its title, but never its code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.own_course import own_course
from distlab.cli.screen import command, show, show_json, waiting, warn, wrapped
from distlab.curriculum import (
    Curriculum,
    CurriculumError,
    Progress,
    ProgressUnavailableError,
    Unit,
)
from distlab.curriculum.regions import functions_of
from distlab.grading import FAILED, NOT_STARTED
from distlab.paths import shown

if TYPE_CHECKING:
    from distlab.grading.written_tests import Score

_SKELETON = '''\
"""Your tests for `{unit}`. To score them, run: distlab score-test {unit}

A test should pass with every right solution and fail with wrong ones. We run it with
the solutions of each task whose function it names. It can take two parameters:

run    results = run(program, n) runs program(comm, unit) on n simulated ranks, and
       returns a list with each rank's return value. It fails if a rank raises, if
       all ranks wait, or if a message doesn't fit. results.messages and
       results.num_bytes count what each rank sent, and .rounds, after
       run(program, n, message_bytes=8), is the longest chain of 8-byte messages.
unit   the solution, for tests that don't need any ranks

Functions: {functions}
"""

import torch


def test_{first}(run):
    def program(comm, unit):
        tensor = torch.tensor([float(comm.rank)])
        # call unit.{first} here, as its docstring says
        return tensor

    results = run(program, 3)
    assert len(results) == 3
'''


def score_test(name: str = "", *, file: str = "", as_json: bool = False) -> int:
    """Score the tests for a unit or a task; return 0 if they catch every mistake.

    If there is no test file yet, write a first one and return 10 without scoring.

    Raises:
        CurriculumError: you can't write tests for this, or the file has none.
        SourceError: the file isn't valid Python.
    """
    curriculum = own_course()
    unit, task = _target(curriculum, name)
    path = Path(file) if file else path_of_tests(curriculum, unit)
    if not file and not path.exists():
        path.write_text(_skeleton(curriculum, unit), encoding="utf-8")
        again = command(f"score-test {unit.name}")
        show([("plain", f"write your tests in {shown(path)}"), ("dim", f"  {again}")])
        return NOT_STARTED
    from distlab.grading.written_tests import read_tests, score
    from distlab.ranks import new_cluster

    tests = read_tests(unit, path)
    with (
        waiting(f"running {shown(path)}", quiet=as_json) as sign,
        new_cluster() as cluster,
    ):
        scored = score(
            curriculum,
            cluster,
            unit,
            tests,
            task=task,
            on_step=lambda step: sign(f"running your tests with {step}"),
        )
    caught, total = len(scored.caught), len(scored.wrong)
    if not task and not file:
        _keep(Progress(curriculum.root), unit, caught, total)
    if as_json:
        show_json(
            {
                "unit": unit.name,
                "caught": scored.caught,
                "escaped": [entry.id for entry in scored.escaped],
                "do_not_count": {n: list(why) for n, why in scored.refused.items()},
                "score": caught,
                "of": total,
            }
        )
    else:
        show(_told(curriculum, unit, scored))
    return 0 if caught == total else FAILED


def path_of_tests(curriculum: Curriculum, unit: Unit) -> Path:
    """Return the path of the learner's tests of a unit."""
    return curriculum.root / unit.folder / f"test_{unit.name}.py"


def _target(curriculum: Curriculum, name: str) -> tuple[Unit, str]:
    """Return the unit, and the task if the learner named one."""
    from distlab.grading.written_tests import units_with_tests

    units = {unit.name: unit for unit in units_with_tests(curriculum)}
    if name in units or not name:
        return units[name or next(iter(units))], ""
    task = curriculum.task(name) if name not in curriculum.units else None
    if task is None or task.unit not in units:
        raise CurriculumError(
            f"we can only score tests for {' and '.join(units)} so far, not for {name}"
        )
    return units[task.unit], task.id


def _skeleton(curriculum: Curriculum, unit: Unit) -> str:
    text = unit.solution(curriculum.root).read_text(encoding="utf-8")
    names = [name for own in functions_of(text).values() for name in own]
    lines = wrapped(", ".join(names))
    return _SKELETON.format(unit=unit.name, functions="\n".join(lines), first=names[0])


def _keep(progress: Progress, unit: Unit, caught: int, total: int) -> None:
    try:
        progress.keep("tests", {unit.name: {"caught": caught, "of": total}})
    except ProgressUnavailableError as error:
        warn(str(error))


def _told(curriculum: Curriculum, unit: Unit, scored: Score) -> list[tuple[str, str]]:
    """Report the score per task, tests that don't count, and some missed mistakes."""
    lines: list[tuple[str, str]] = []
    for name, (id_, said) in scored.refused.items():
        which = "the reference" if id_ == "reference" else "a right solution"
        lines.append(("fail", f"{name} doesn't count because it fails with {which}"))
        lines += [("plain", row) for row in wrapped(said, "  ")]
    for task in unit.tasks:
        own = [entry for entry in scored.wrong if entry.task == task.id]
        if not own:
            continue
        escaped = [entry for entry in scored.escaped if entry.task == task.id]
        style = "fail" if escaped else "pass"
        count = f"{len(own) - len(escaped):3} of {len(own):3}"
        lines.append((style, f"{task.number:5}{task.name:20}{count}"))
        if escaped:
            title = f"one that your tests missed: {escaped[0].title}"
            lines += [("plain", row) for row in wrapped(title, "     ")]
    total = (
        f"your tests catch {len(scored.caught)} of {len(scored.wrong)} wrong solutions"
    )
    return [*lines, ("plain", total)]
