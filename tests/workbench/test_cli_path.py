"""Where a learner is on the path: what counts as passed, what is next, `status`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from distlab.cli.check import check, chosen, next_task
from distlab.cli.guide import guide
from distlab.cli.reset import reset
from distlab.cli.status import status
from distlab.curriculum import CurriculumError, Progress, Task, load_curriculum
from distlab.curriculum.path import current_task, passed_tasks
from distlab.grading.clause import checks_of, sizes_of
from distlab.grading.preflight import look_at
from distlab.grading.remember import record
from distlab.runner import Cluster
from tests.workbench.course import EXCHANGE, FIRST, Course, keep_warm, pristine
from tests.workbench.golden import Golden

Capture = pytest.CaptureFixture[str]


def test_status_fits_and_counts(here: Course, capsys: Capture) -> None:
    core = [task for task in load_curriculum().tasks if not task.stretch]
    for number, task in enumerate(core):
        status()
        said = capsys.readouterr().out
        assert f"{number} of {len(core)}" in said
        assert f"next: {task.number} at phase{task.number[0]}" in said
        assert said.count("✓") == sum(
            other.number[0] == task.number[0] for other in core[:number]
        )
        for _ in range(11):
            Progress(here.root).record_verdict(task.id, passed=True, digest="")
    status()
    said = capsys.readouterr().out
    assert "next:" not in said
    assert re.search(r"\b1\.17 ", said)
    status(all_phases=True)
    said = capsys.readouterr().out
    assert "\n  · 1.17 " in said


def test_guide_opens_the_page_of_the_site_or_names_the_text(
    here: Course, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = here.root / "phase1_data_parallel/guide/collectives.md"
    assert guide("1.4") == 0
    place = re.search(r"collectives\.md:(\d+)", capsys.readouterr().out)
    assert place
    line = page.read_text(encoding="utf-8").splitlines()[int(place[1]) - 1]
    assert line == "### 1.4 collectives.all_reduce"
    built = here.root / "site/phase1_data_parallel/guide/collectives.html"
    built.parent.mkdir(parents=True)
    built.touch()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("distlab.cli.trace.has_screen", lambda: True)
    assert guide("1.4") == guide("collectives") == 0
    assert opened == [f"{built.as_uri()}#14-collectivesall_reduce", built.as_uri()]
    with pytest.raises(CurriculumError, match=r"9\.9"):
        guide("9.9")


def test_status_sees_a_function_that_was_emptied(here: Course, capsys: Capture) -> None:
    here.fill(FIRST, EXCHANGE)
    here.judged(FIRST)
    assert status() == 0
    assert "✓ 1.1 " in capsys.readouterr().out
    here.template().write_text(pristine("collectives"), encoding="utf-8")
    assert status() == 0
    said = capsys.readouterr().out
    assert re.search(r"^  · 1\.1 ", said, re.MULTILINE)
    assert "✓" not in said
    assert check(["1.1"]) == 10
    assert passed_tasks(load_curriculum(), Progress(here.root)) == set()
    here.fill(FIRST, EXCHANGE)
    assert passed_tasks(load_curriculum(), Progress(here.root)) == {FIRST}


def test_code_that_passed_once_counts_again_when_it_is_back(here: Course) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    here.fill(FIRST, EXCHANGE)
    here.judged(FIRST)
    here.fill(FIRST, "comm.send(tensor, 1)")
    assert passed_tasks(curriculum, progress) == set()
    here.judged(FIRST, passed=False)
    here.fill(FIRST, f"# a remark changes nothing\n{EXCHANGE.strip()}")
    assert passed_tasks(curriculum, progress) == {FIRST}
    here.template().write_text("def broken(:")
    assert passed_tasks(curriculum, progress) == set()  # the last verdict was a fail


def test_a_task_that_failed_by_its_siblings_mistake_counts_again(here: Course) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    here.fill(FIRST, EXCHANGE)
    file = look_at(curriculum, curriculum.task(FIRST), "mine")[0].digest
    same = here.digest(FIRST)
    for passed, digest in ((True, file), (False, "of the file with a broken sibling")):
        progress.record_verdict(FIRST, passed=passed, digest=same, file_digest=digest)
    assert passed_tasks(curriculum, progress) == {FIRST}
    progress.record_verdict(FIRST, passed=False, digest=same, file_digest=file)
    assert passed_tasks(curriculum, progress) == set()
    assert current_task(curriculum, progress).id == FIRST


def test_a_pass_counts_whatever_number_of_ranks_it_was_judged_at(
    here: Course, capsys: Capture
) -> None:
    """4.4 has no ranks: as a learner's files, all references must have a tick."""
    curriculum, progress = load_curriculum(), Progress(here.root)
    for unit in curriculum.units.values():
        shutil.copy(unit.solution(here.root), unit.template(here.root))
    for task in curriculum.tasks:
        looked, ready = look_at(curriculum, task, "mine")
        assert ready is not None
        sizes = {size for check in checks_of(task.id) for size in check.worlds}
        verdict = replace(
            looked, status="pass", ran=True, world_sizes=sizes_of(task.id, sizes)
        )
        record(progress, verdict)
    assert passed_tasks(curriculum, progress) == {task.id for task in curriculum.tasks}
    status(all_phases=True)
    assert capsys.readouterr().out.count("✓") == len(curriculum.tasks)


def test_a_task_without_ranks_is_judged_and_recorded(
    here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_warm(cluster, monkeypatch)
    curriculum = load_curriculum()
    task = curriculum.task("4.4")
    assert sizes_of(task.id, [1]) == ()
    unit = curriculum.units[task.unit]
    shutil.copy(unit.solution(here.root), unit.template(here.root))
    assert check(["4.4"]) == 0
    assert passed_tasks(curriculum, Progress(here.root)) == {task.id}
    entry = here.progress()[task.id]
    assert (entry["checks"], entry["fails_now"]) == (1, False)


def test_a_file_is_judged_by_the_tasks_of_its_unit(
    here: Course, capsys: Capture
) -> None:
    """Nothing of it is written yet, so that no rank is needed."""
    curriculum = load_curriculum()

    def numbers(*names: str, unit: str = "", phase: int | None = None) -> list[str]:
        check(names, phase=phase, code=f"{unit}.py", as_json=True)
        return [task["number"] for task in json.loads(capsys.readouterr().out)["tasks"]]

    for unit in ("collectives", "ring_allreduce", "trainer"):  # two have an all_reduce
        (here.root / f"{unit}.py").write_text(pristine(unit))
        own = [task.number for task in curriculum.units[unit].tasks]
        assert numbers(own[0][0], unit=unit) == own
        assert numbers(own[-1], unit=unit) == own[-1:]  # as it was named
    assert numbers(unit="trainer") == own  # none was named, and 1.1 is not in it
    assert numbers(unit="collectives") == ["1.1"]
    with pytest.raises(ValueError, match=r"trainer\.py\b.*\btrainer$"):
        check([], phase=2, code="trainer.py")
    assert check(["1.4"], code="trainer.py") == 1  # named: it lacks the function
    Path("empty.py").write_text("")
    with pytest.raises(ValueError, match=r"empty\.py"):
        check([], code="empty.py")


@pytest.mark.slow
def test_a_pass_under_pytest_counts(here: Course) -> None:
    here.fill(FIRST, EXCHANGE)
    done = here.python("-m", "pytest", "-q", "tests/test_phase1.py", "-k", "exchange")
    assert "1 passed" in done.out
    assert here.progress()[FIRST]["passes"] == [here.digest(FIRST)]


def test_a_bare_number_is_a_phase_and_never_a_part_of_a_name(here: Course) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    assert chosen(curriculum, progress, ["2"]) == curriculum.tasks_of(2)
    with pytest.raises(ValueError, match=r"\b9\b"):
        chosen(curriculum, progress, ["9"])
    with pytest.raises(ValueError, match="'1'"):
        curriculum.task("1")
    with pytest.raises(ValueError, match=r"'reduce'.*\b1\.4 .*\b3\.2 "):
        curriculum.task("reduce")


def test_check_and_status_name_the_same_next_task(
    here: Course, capsys: Capture
) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    by_number = {task.number: task.id for task in curriculum.tasks}
    for number in ("1.1", "1.2", "1.8"):
        progress.record_verdict(by_number[number], passed=True, digest="")
    lines = next_task(curriculum, progress, by_number["1.2"])  # checked once more
    assert status() == 0
    assert "next: 1.9 " in capsys.readouterr().out
    assert any("next: 1.9 " in line for _, line in lines)


def test_status_tells_of_the_last_check_and_not_of_now(
    here: Course, capsys: Capture, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)  # `distlab`, as typed
    for passed in (True, False):
        here.fill(FIRST, EXCHANGE if passed else "comm.send(tensor, 1)")
        here.judged(FIRST, passed=passed)
    assert status() == 0
    said = capsys.readouterr().out
    assert re.search(r"^  ! 1\.1 ", said, re.MULTILINE)
    golden("cli/status", said)


def test_status_recalls_what_was_a_fortnight_ago(
    here: Course, capsys: Capture, golden: Golden
) -> None:
    progress = Progress(here.root)
    progress.record_verdict(FIRST, passed=True, digest="")
    today = datetime.now(UTC)
    status(now=today + timedelta(days=13, hours=23))
    assert capsys.readouterr().out[0] in "█░"
    status(now=today + timedelta(days=20, hours=1))
    last, following, idea = capsys.readouterr().out.splitlines()[:3]
    assert re.search(r"\b20\b.*\b1\.1\b", last)
    assert re.search(r"\b1\.2\b", following)
    assert "collectives" in idea
    golden("cli/status-after-a-pause", "\n".join((last, following, idea)))
    for broken in ({"at": 3}, {"at": "then", "task": FIRST}, [], {"task": "gone"}):
        path = here.state / "progress.json"
        path.write_text(json.dumps({"last": broken}))
        assert status(now=today) == 0
        assert capsys.readouterr().out[0] in "█░"


def test_optional_tasks_are_offered_once_the_phase_is_through(here: Course) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    third = {unit.name for unit in curriculum.phase(3).units}
    core = [task for task in curriculum.tasks if not task.stretch]
    ours = [task for task in core if task.unit in third]
    last = ours[-1]
    later = [task.number for task in core[core.index(last) + 1 :]]
    onward = f"next: {later[0] if later else core[0].number} "

    def said(task: Task) -> str:
        progress.record_verdict(task.id, passed=True, digest="")
        lines = [line for _, line in next_task(curriculum, progress, task.id)]
        return " ".join(" ".join(lines).split())

    first, *others = [t for t in curriculum.tasks if t.stretch and t.unit in third]
    for task in ours[:-1]:
        assert first.title not in said(task)
    # The path goes on where it would have gone; the phase's stretch tasks stand below.
    after = said(last)
    assert after.index(onward) < after.index(f"{first.number} {first.title}")
    assert f"watch {first.number} " in after
    assert all(re.search(rf"\b{task.number}\b", after) for task in others)
    # One of them passed: the next task is still the path's.
    after = said(first)
    assert onward in after
    assert f"{others[0].number} {others[0].title}" in after
    assert first.title not in after
    for task in core:
        progress.record_verdict(task.id, passed=True, digest="")
    # With the whole path behind one, what is next is optional, and says so.
    assert not re.search(r"\bnext: ", said(last))
    stretch = [task for task in curriculum.tasks if task.stretch]
    following = stretch[stretch.index(others[-1]) + 1 :] or stretch
    assert re.search(rf"\bnext, \w+: {following[0].number} ", said(others[-1]))


def test_what_is_reset_has_not_passed(here: Course, capsys: Capture) -> None:
    here.fill(FIRST, EXCHANGE)
    here.judged(FIRST)
    assert reset("collectives") == 0
    said = capsys.readouterr().out
    assert "next: 1.1 " in said
    assert passed_tasks(load_curriculum(), Progress(here.root)) == set()
    (back,) = re.findall(r"^  cp (\S+) (\S+)$", said, re.MULTILINE)
    shutil.copy(*back)
    assert passed_tasks(load_curriculum(), Progress(here.root)) == {FIRST}
