"""Hostile and broken submissions: a truthful verdict, in time, and nothing left.

They stand in tests/hostile; README.md there says what is not contained.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.curriculum import load_curriculum
from distlab.grading.grade import Grader
from distlab.grading.hostile import BOUND_S, HostileResult, judge
from distlab.grading.hostile_cases import FOLDER, HostileCase, HostileError, read_cases
from distlab.grading.verdict import TaskVerdict
from distlab.runner import Cluster
from tests.workbench.golden import Golden

ROOT = Path(__file__).parents[2]
CASES = read_cases(ROOT / FOLDER)
BY_ID = {case.id: case for case in CASES}
SEND_LATE = """
import time
time.sleep(0.5)
if comm.rank == 0:
    comm.send(tensor, 1)
elif comm.rank == 1:
    comm.recv(tensor, 0)
"""


def first_of_each_verdict_first() -> list[Any]:
    """All cases; those whose verdict another one has are left to `make test-slow`."""
    seen: set[tuple[str, str]] = set()
    marked = []
    for case in CASES:
        verdict = case.status, case.slug
        marks = [pytest.mark.slow] if verdict in seen else []
        marked.append(pytest.param(case, marks=marks, id=case.id))
        seen.add(verdict)
    return marked


@pytest.mark.parametrize("case", first_of_each_verdict_first())
def test_a_hostile_submission_gets_its_verdict(
    cluster: Cluster, case: HostileCase
) -> None:
    if case.obstacle():
        pytest.skip(case.obstacle())
    (result,) = judge(ROOT, cluster, [case])
    assert result.problems() == []


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(CASES) >= 45
    assert sum(bool(case.call) for case in CASES) >= 20
    titles = [case.title for case in CASES]
    assert len(set(titles)) == len(titles)


def test_a_file_that_changes_while_it_is_graded_is_judged_as_it_was_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    curriculum = load_curriculum(ROOT)
    path = tmp_path / "collectives.py"
    head = "def send_recv(comm, tensor):\n"
    path.write_text(head + SEND_LATE.replace("\n", "\n    ").rstrip() + "\n")
    saved = threading.Timer(0.2, path.write_text, ["raise SystemExit\n"])
    grader = Grader(curriculum, cluster, code=str(path), seed=1, worlds=(2,))
    saved.start()
    verdict = grader.grade([curriculum.task("collectives.exchange")]).tasks[0]
    saved.join()
    assert (verdict.status, verdict.message) == ("pass", "")
    assert path.read_text() == "raise SystemExit\n"


# ── what is found must be found ─────────────────────────────────────────────────────


def result(
    case: HostileCase, verdict: TaskVerdict | None = None, **facts: Any
) -> HostileResult:
    good = TaskVerdict(
        id=case.task,
        number="1.1",
        title="",
        status="pass",
        path="",
        digest="",
        message="all of it is right",
    )
    return HostileResult(
        case=case, verdict=verdict or good, **{"seconds": 0.1, **facts}
    )


RIGHT = HostileCase(
    id="HO01",
    task="collectives.exchange",
    title="",
    status="pass",
    slug="",
    body="pass",
)


@pytest.mark.parametrize(
    ("case", "facts", "problem"),
    [
        ({"status": "fail"}, {}, "pass "),
        ({"slug": "spinning"}, {}, "[spinning]"),
        ({"says": "left"}, {}, "'left'"),
        ({"call": "send → 1"}, {"line": 3}, "rank 0, send → 1, :3"),
        ({}, {"left": 2}, "2 "),
        ({}, {"changed": ("tests/test_phase1.py",)}, "tests/test_phase1.py"),
        ({}, {"seconds": BOUND_S + 1}, "21.0 s"),
    ],
)
def test_each_kind_of_problem_is_seen(
    case: dict[str, Any], facts: dict[str, Any], problem: str
) -> None:
    assert result(RIGHT).problems() == []
    (found,) = result(replace(RIGHT, **case), **facts).problems()
    assert problem in found


def test_a_wrong_expectation_is_a_problem(cluster: Cluster) -> None:
    wrong = replace(BY_ID["HE03"], status="pass", slug=None, says="")
    (found,) = judge(ROOT, cluster, [wrong])
    assert len(found.problems()) == 1
    assert (found.case.status, found.verdict.status) == ("pass", "fail")


def test_a_change_of_the_course_is_seen(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the guard the very same submission gets through to the copy's tests."""
    monkeypatch.setattr(
        "distlab.grading.harness.off_limits", lambda impl: {"course": [], "secrets": []}
    )
    case = replace(BY_ID["HC22"], slug=None, says="")
    (found,) = judge(ROOT, cluster, [case])
    assert found.changed == ("tests/test_phase1.py",)


def test_what_is_handed_in_does_not_reach_the_checkout(cluster: Cluster) -> None:
    course = [ROOT / "curriculum.toml", *(ROOT / "solutions").rglob("*.py")]
    before = [path.read_bytes() for path in course]
    judge(ROOT, cluster, [BY_ID["HC28"], BY_ID["HC25"]])
    assert [path.read_bytes() for path in course] == before


# ── the catalogue itself ────────────────────────────────────────────────────────────


def refused(
    folder: Path, text: str = "", *, twice: bool = False, **changes: Any
) -> str:
    """What is said about a catalogue of one case, or about two of the same id."""
    row = {
        "id": "HO01",
        "task": "collectives.exchange",
        "title": "nothing",
        "status": "fail",
        "body": "pass",
    } | changes
    lines = "".join(f"{k} = {json.dumps(v)}\n" for k, v in row.items() if v is not None)
    entry = f"[[case]]\n{lines}"
    (folder / "some.toml").write_text(text or entry * (1 + twice))
    with pytest.raises(HostileError) as caught:
        read_cases(folder)
    return str(caught.value)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"title": None}, "some.toml: HO01: title "),
    ({"color": "red"}, "HO01: color "),
    ({"id": "X1"}, "X1: "),
    ({"status": "maybe"}, "HO01: 'maybe' "),
    ({"body": None}, "HO01: "),
    ({"body": None, "file": "cake"}, "HO01: 'cake' "),
    ({"twice": True}, "HO01 "),
    ({"text": "[[case]\n"}, "some.toml "),
]


def test_a_broken_catalogue_is_refused(tmp_path: Path, golden: Golden) -> None:
    said = []
    for changes, named in BROKEN:
        said.append(refused(tmp_path, **changes))
        assert named in said[-1]
    ours = [re.sub(r"(?<=TOML): .*", "", text) for text in said]
    golden("grading/broken_hostile_catalogue", "\n".join(ours))


def test_waiting_for_a_fifo_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the grader itself hung, the test would end and say so."""
    monkeypatch.setattr("distlab.grading.hostile.BOUND_S", 0.1)
    monkeypatch.setattr(
        "distlab.grading.grade.look_at", lambda *_: time.sleep(60) or (None, None)
    )
    with pytest.raises(TimeoutError, match=r"\b0\.2 s"):
        judge(ROOT, cluster, [BY_ID["HF04"]])
