"""The catalogue of wrong solutions, and the command that grades it.

All of them, and the right ones: `make mutants`. Those of what changed, and one of each
other unit: `make test-touched`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cli import mutants as command
from distlab.grading.catalogue import CatalogueError, Entry, read_catalogue
from distlab.grading.changes import with_changes
from distlab.grading.differential.observe import COMPILER
from distlab.grading.mutants import EntryResult, judge
from distlab.runner import Cluster
from tests.workbench.course import ROOT, Course
from tests.workbench.golden import Golden
from tests.workbench.judging import CURRICULUM, catalogue
from tests.workbench.launching import linux

BY_ID = catalogue()
ENTRIES = [*BY_ID.values()]


def test_an_endless_loop_is_ended_and_named(cluster: Cluster) -> None:
    endless = next(e for e in ENTRIES if e.slug == "spinning")
    (result,) = judge(CURRICULUM, cluster, [endless])
    assert result.as_named


# ── the catalogue itself ────────────────────────────────────────────────────────────


def test_every_clause_has_at_least_two_mutants_and_every_task_an_accept_variant() -> (
    None
):
    for task in CURRICULUM.tasks:
        own = [entry for entry in ENTRIES if entry.task == task.id]
        for clause in task.clauses:
            assert sum(entry.clause == clause for entry in own) >= 2, (task.id, clause)
        assert sum(entry.is_mutant for entry in own) >= 5
        assert sum(not entry.is_mutant for entry in own) >= 3


def test_titles_tell_the_entries_of_a_task_apart() -> None:
    titles = [(entry.task, entry.title) for entry in ENTRIES]
    assert len(set(titles)) == len(titles)


def refused(
    folder: Path,
    text: str = "",
    *,
    name: str = "CO01",
    file: str = "exchange.toml",
    twice: bool = False,
    **changes: Any,
) -> str:
    """What is said about a catalogue of one entry, or about two of the same id."""
    row = {"title": "nothing", "rejected": "C1", "body": "pass"} | changes
    lines = "".join(f"{k} = {json.dumps(v)}\n" for k, v in row.items() if v is not None)
    path = folder / "collectives" / file
    path.parent.mkdir(parents=True)
    path.write_text(text or f"[{name}]\n{lines}")
    if twice:
        shutil.copy(path, path.with_name("pass_around.toml"))
    with pytest.raises(CatalogueError) as caught:
        read_catalogue(CURRICULUM, folder)
    return str(caught.value)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"title": None}, "exchange.toml: CO01: title "),
    ({"color": "red"}, "CO01: color "),
    ({"name": "X1"}, "X1: "),
    ({"name": "A01"}, "A01: .* `rejected`"),
    ({"rejected": None}, "CO01: .* `rejected`"),
    ({"file": "nothing.toml"}, "nothing.toml: "),
    ({"rejected": "C9"}, "CO01: .* 'C9'"),
    ({"rejected": "C1 bad-luck"}, "CO01: .* bad-luck"),
    ({"twin": "A01"}, "CO01: .* A01"),
    ({"function": "nothing"}, "CO01: collectives.exchange .* 'nothing'"),
    ({"body": "return ("}, "CO01: .*return [(]"),
    ({"body": 3}, "CO01: body "),
    ({"body": None, "change": [["dst=1"]]}, "CO01: change "),
    ({"body": None}, "CO01: .* body .* change"),
    ({"change": [["dst=1", "dst=0"]]}, "CO01: .* body .* change"),
    ({"body": None, "change": [["dst=7", "dst=0"]]}, "CO01: .*'dst=7' .* 0 "),
    ({"body": None, "change": [["comm", "c"]]}, "CO01: .*'comm' .* 4 "),
    ({"body": None, "change": []}, "CO01: "),
    ({"twice": True}, "CO01 "),
    ({"text": "[[mutant]\n"}, "exchange.toml "),
    ({"text": "CO01 = 3\n"}, "CO01: "),
]


def test_a_broken_catalogue_is_refused(tmp_path: Path, golden: Golden) -> None:
    said = []
    for number, (changes, named) in enumerate(BROKEN):
        text = refused(tmp_path / f"{number}", **changes)
        assert re.search(named, text), (changes, text)
        if "body" not in changes or changes["body"] != "return (":  # Python's words
            said.append(re.sub(r"^/.*/|(?<=TOML): .*", "", text))
    golden("grading/broken_catalogue", "\n".join(said))


def test_the_solution_itself_is_no_entry(tmp_path: Path) -> None:
    body = """
    if comm.rank == 0:
        comm.send(tensor, dst=1)
    elif comm.rank == 1:
        comm.recv(tensor, src=0)
    """
    other = body.replace("src=0", "src=1")
    assert "CO01: " in refused(tmp_path / "same", body=body)
    with pytest.raises(pytest.fail.Exception):  # nothing is wrong with it
        refused(tmp_path / "other", body=other)


def test_a_change_keeps_the_indentation_of_its_place() -> None:
    body = "for rank in ranks:\n    send(rank)\n    wait(rank)\nwait(0)\n"
    pairs = [
        ("send(rank)\nwait(rank)", "if rank:\n    send(rank)"),
        ("wait(0)", "pass\nwait(1)"),
    ]
    assert with_changes(body, pairs).splitlines() == [
        "for rank in ranks:",
        "    if rank:",
        "        send(rank)",
        "pass",
        "wait(1)",
    ]


def test_a_body_replaces_the_region_and_nothing_else() -> None:
    unit = CURRICULUM.units["collectives"]
    solution = unit.solution(CURRICULUM.root).read_text(encoding="utf-8")
    entry = Entry(
        id="CO01",
        task="collectives.exchange",
        title="",
        clause="C1",
        body="\n  pass\n  return None\n",
        signature="def send_recv(comm, tensor):",
        helper="\nimport os\n",
    )
    begin, rest = solution.split("### BEGIN SOLUTION collectives.exchange", 1)
    _, end = rest.split("### END SOLUTION\n", 1)
    begin = begin.replace(
        "def send_recv(comm: Comm, tensor: Tensor) -> None:",
        "def send_recv(comm, tensor):",
    )
    expected = f"{begin}pass\n    return None\n{end}\n\nimport os\n"
    assert entry.applied_to(solution) == expected


# ── the command ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Callable[..., None]:
    """Let the command see these entries, and the tests' warm cluster."""

    class Lent:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Cluster:
            return cluster

        def __exit__(self, *_: object) -> None:
            pass

    def use(*entries: Entry) -> None:
        monkeypatch.setattr("distlab.runner.Cluster", Lent)
        monkeypatch.setattr(
            "distlab.grading.catalogue.read_catalogue", lambda _: list(entries)
        )

    return use


def test_command_says_all_is_well(
    run_on: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_on(BY_ID["CO01"], BY_ID["A01"])
    assert command.mutants() == 0
    out = re.sub(r"  +", "  ", capsys.readouterr().out)
    assert "CO01  killed" in out
    assert "A01  accepted" in out
    assert "1 of  1 100%" in out


def test_command_names_survivors_and_wrong_names(
    run_on: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    survivor = replace(BY_ID["A01"], id="CO98", clause="C1", slug="unmatched-recv")
    misnamed = replace(BY_ID["CO01"], slug="unmatched-recv")
    rejected = replace(BY_ID["CO02"], id="A99", clause="", slug="")
    run_on(survivor, misnamed, rejected)
    assert command.mutants() == 1
    out = capsys.readouterr().out
    for word in ("SURVIVED", "MISNAMED", "REJECTED", "expected: C1 [unmatched-recv]"):
        assert word in out


def test_command_tries_again_what_was_judged_otherwise(
    run_on: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on(BY_ID["CO01"], BY_ID["A01"])
    played: list[str] = []

    def judged(
        curriculum: object, cluster: object, entries: Iterable[Entry], *_: object
    ) -> list[EntryResult]:
        """Once more than before, CO01 is named as expected."""
        results = []
        for entry in entries:
            slug = "" if not played and entry.is_mutant else entry.slug
            status = "fail" if entry.is_mutant else "pass"
            result = EntryResult(
                entry=entry,
                status=status,
                clause=entry.clause,
                slug=slug,
                message="",
                seconds=0.1,
            )
            results.append(result)
            played.append(entry.id)
        return results

    monkeypatch.setattr("distlab.grading.mutants.judge", judged)
    assert command.mutants(second_try=True) == 0
    assert played == ["CO01", "A01", "CO01"]
    (said,) = re.findall("^second try: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said == "CO01 collectives.exchange"  # .ci/run reads this line
    played.clear()
    assert command.mutants() == 1


def test_command_gives_the_json_of_the_figures(
    run_on: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_on(BY_ID["CO01"], BY_ID["A01"])
    assert command.mutants(as_json=True, phase=1) == 0
    report = json.loads(capsys.readouterr().out)
    (mutant,), (accept,) = report["mutants"], report["accepts"]
    assert set(report) == {"mutants", "accepts", "not_played", "not_judged"}
    assert report["not_played"] == 0
    assert mutant.pop("seconds") > 0
    assert "rank 1" in mutant.pop("message")
    assert mutant == {
        "id": "CO01",
        "task": "collectives.exchange",
        "killed": True,
        "as_named": True,
        "clause": "C1",
        "slug": "unmatched-send",
    }
    assert accept["accepted"] is True


def test_command_says_what_it_had_no_time_for(
    run_on: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on(BY_ID["CO01"], BY_ID["CO02"], BY_ID["A01"])
    times = iter(2 * [0.0, 0.0, 30.0, 61.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(command, "time", clock)
    assert command.mutants(minutes=1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["not_played"] == 1
    assert command.mutants(minutes=1) == 0
    out = capsys.readouterr().out
    assert sum(out.count(name) for name in ("CO01 ", "CO02 ", "A01 ")) == 2
    assert re.search(r"^1 \D+: 1 minutes", out, re.MULTILINE)


def test_command_refuses_what_matches_nothing(run_on: Callable[..., None]) -> None:
    run_on(BY_ID["CO01"])
    with pytest.raises(ValueError, match="'TR99'"):
        command.mutants(only="TR99")
    with pytest.raises(ValueError, match=r"\b9\b"):
        command.mutants(phase=9)


def test_a_harness_error_is_neither_killed_nor_accepted() -> None:
    seen = EntryResult(
        entry=BY_ID["CO01"],
        status="error",
        clause="",
        slug="",
        message="",
        seconds=0.0,
    )
    assert not seen.killed
    assert not replace(seen, entry=BY_ID["A01"]).is_right


@pytest.mark.slow
def test_operations_are_not_counted_because_of_another_unit() -> None:
    dear = BY_ID["A158"]  # right, and computes more than the reference
    unit = CURRICULUM.units[dear.unit]
    assert COMPILER not in unit.preload
    with Cluster(preload=(COMPILER,)) as other:
        (result,) = judge(CURRICULUM, other, [dear])
    assert result.status == "pass", result.message


@linux
@pytest.mark.parametrize("times", [1, 10])
def test_sigterm_leaves_neither_folder_nor_process(
    here: Course, tmp_path: Path, times: int
) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    done = here.stopped(
        *("-m", "distlab", "mutants", "--only", "pass_around"),
        once=lambda: list(temp.glob("distlab-mutants-*/*")),
        by=signal.SIGTERM,
        times=times,
        cwd=ROOT,
        TMPDIR=str(temp),
    )
    # One that comes when all is tidied up ends the process by itself.
    assert done.code in (128 + signal.SIGTERM, *[-signal.SIGTERM] * (times > 1))
    assert list(temp.iterdir()) == []
