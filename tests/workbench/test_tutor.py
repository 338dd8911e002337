"""The concepts, the ranking, the tutor's functions, and the routes."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab import tutor
from distlab.cli.explain import explain
from distlab.cli.status import status
from distlab.comm import Comm
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import read_torch_errors
from distlab.runner import Cluster
from distlab.tutor.concepts import Concept, find_concept, read_concepts
from distlab.tutor.lessons import NotSolvedYetError
from distlab.tutor.ranking import nearest, ties
from tests.workbench.course import (
    EXCHANGE,
    FIRST,
    RING_OF_SENDS,
    ROOT,
    SECOND,
    Course,
    keep_warm,
)
from tests.workbench.test_commands import expect_typeable
from tests.workbench.test_learner_texts import anchor_of
from tests.workbench.tutor_questions import FIVE, SIZING, TWENTY

Capture = pytest.CaptureFixture[str]
CONCEPTS = read_concepts()
CURRICULUM = load_curriculum(ROOT)

each = pytest.mark.parametrize("concept", CONCEPTS.values(), ids=[*CONCEPTS])


# ── the concepts ────────────────────────────────────────────────────────────────────


def test_their_names_are_theirs_alone() -> None:
    others = {*read_misconceptions(), *(error.name for error in read_torch_errors())}
    spelled = [{c.name, *c.also} for c in CONCEPTS.values()]
    names = [
        name
        for own in spelled
        for name in {one.lower().replace("_", "-").replace(" ", "-") for one in own}
    ]
    assert len(names) == len(set(names))
    assert not others & set(names)


@each
def test_a_snippet_runs_and_prints_what_is_said(
    concept: Concept, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(variable, "0")  # so that they are removed again
        monkeypatch.delenv(variable)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(
            compile(concept.snippet, f"{concept.name}.py", "exec"),
            {"__name__": "snippet"},
        )
    assert said.getvalue().strip("\n") == concept.prints


@each
def test_a_concept_is_complete_and_what_it_names_is_there(concept: Concept) -> None:
    assert concept.asks
    assert bool(concept.picture) != bool(concept.command)
    if concept.picture:
        assert (ROOT / concept.picture).is_file()
    if concept.command and "--help" not in concept.command:
        known = {error.name for error in read_torch_errors()}
        if concept.command.removeprefix("distlab explain ") not in known:
            expect_typeable(concept.command)
    assert concept.guide
    for page in concept.guide:
        unit, _, anchor = page.partition("#")
        text = CURRICULUM.units[unit].guide(ROOT).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        assert anchor in {anchor_of(title) for title in titles}, page
    for number in concept.tasks:
        assert CURRICULUM.task(number).number == number
    assert set(concept.mistakes) <= set(read_misconceptions())
    assert set(concept.errors) <= {error.name for error in read_torch_errors()}


# ── questions ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("question", "name"), {**FIVE, **TWENTY, **SIZING}.items())
def test_a_question_finds_its_concept_first(question: str, name: str) -> None:
    found = nearest(question)
    assert found[0].concept.name == name
    assert [near.concept.name for near in ties(found)] == [name]
    assert nearest(question) == found


def test_a_sizing_question_leads_to_the_plan_and_its_lesson() -> None:
    for name in set(SIZING.values()):
        concept = CONCEPTS[name]
        assert concept.command.startswith("distlab plan ")
        assert all(page.startswith("planning#") for page in concept.guide)


def test_no_concept_has_one_of_the_questions_as_it_stands() -> None:
    asked = {question.lower() for question in {**FIVE, **TWENTY, **SIZING}}
    assert not asked & {ask.lower() for c in CONCEPTS.values() for ask in c.asks}


@pytest.mark.parametrize(
    "question",
    [
        "",
        "?",
        "my dog ate the gradients",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "hello world",
        "x" * 10_000,
    ],
)
def test_what_nothing_fits_finds_nothing(question: str) -> None:
    assert nearest(question) == []


def test_a_tie_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("distlab.tutor.ranking.TIE", 0.0)
    assert explain("Why does my all-reduce hang?") == 0
    said = capsys.readouterr().out
    near = ties(nearest("Why does my all-reduce hang?"))
    assert len(near) > 1
    assert all(one.concept.name in said.partition("\n\n")[0] for one in near)


def test_names_are_found_however_they_are_written(capsys: Capture) -> None:
    for name in ("DDP", "LOCAL_RANK", "local-rank", "all reduce", "Gloo"):
        concept = find_concept(name)
        assert concept is not None, name
        assert explain(name) == 0
        assert capsys.readouterr().out.startswith(f"{concept.name}: {concept.title}\n")
    assert explain("connection-reset") == 0  # the name of an error of torch
    assert capsys.readouterr().out.startswith("connection-reset: ")


# ── the functions ───────────────────────────────────────────────────────────────────


def test_the_overview_has_its_four_parts() -> None:
    told = tutor.explain_ddp_concepts()
    assert set(told) == {"topics", "workflow", "common_mistakes", "best_practices"}
    assert sum(map(len, told["topics"].values())) == len(CONCEPTS)
    assert all(step["example"] for step in told["workflow"])
    asked = tutor.explain_ddp_concepts("What is the RANK variable?")
    assert asked["topics"][0] == asked["ties"][0] == "environment-variables"
    assert asked["text"].startswith("environment-variables: ")


def test_tools_have_a_schema_that_fits_the_function() -> None:
    tools = {tool["name"]: tool for tool in tutor.get_tools()}
    assert set(tools) == set(tutor.__all__) - {"get_tools", "on_ranks"}
    schema = tools["run_ddp_simulation"]["input_schema"]
    assert schema["properties"]["lr"] == {"type": "number", "default": 0.2}
    assert tools["solution"]["input_schema"]["required"] == ["task"]
    for name, tool in tools.items():
        assert tool["description"], name
        assert "Raises" not in tool["description"]
        assert callable(tool["callable"])


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"epochs": 999}, {"lr": -1.0}])
def test_what_cannot_be_starts_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose"):
        tutor.run_ddp_simulation(**wrong)


@pytest.mark.slow
def test_two_real_trainings_are_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_warm(cluster, monkeypatch)
    told = tutor.compare_ddp_vs_single(world_size=2, epochs=1)
    assert told["status"] == "finished"
    assert (told["ddp"]["world_size"], told["single"]["world_size"]) == (2, 1)
    assert told["largest_difference_of_weights"] < 1e-9
    assert told["speedup"] > 0
    assert set(told["concepts"]) <= set(CONCEPTS)
    run = tutor.run_ddp_simulation(world_size=2, epochs=1)
    assert set(run) == {"status", "message", "metrics", "concepts"}
    assert run["metrics"]["accuracy"] == told["ddp"]["accuracy"]


def test_a_lesson(
    here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_warm(cluster, monkeypatch)
    assert tutor.next_task()["id"] == FIRST
    assert [tutor.hint("1.2")["level"] for _ in range(2)] == [1, 2]
    assert not tutor.why_did_it_hang()["found"]
    here.fill(SECOND, RING_OF_SENDS)
    checked = tutor.check("1.2")
    assert (checked["status"], checked["misconception"]) == ("fail", "ring-of-sends")
    why = tutor.why_did_it_hang()
    assert why["found"]
    assert "DEADLOCK" in why["verdict"]
    assert "send" in why["picture"]
    assert why["text"].startswith("ring-of-sends: ")
    pasted = "Timed out waiting 1ms for recv operation to complete"
    assert "timed-out" in tutor.why_did_it_hang(pasted)["text"]
    here.fill(FIRST, EXCHANGE)
    assert tutor.check()["status"] == "pass"
    assert tutor.next_task()["id"] == SECOND
    assert "comm.recv(" in tutor.solution("1.1")["code"]


def test_an_unsolved_solution_is_refused_and_not_even_read(
    here: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def watched(path: Path, *args: Any, **kwargs: Any) -> str:
        assert "solutions" not in path.parts, path
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", watched)
    with pytest.raises(NotSolvedYetError, match=r"\b1\.4\b"):
        tutor.solution("1.4")


# ── routes ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("route", CURRICULUM.routes, ids=lambda route: route.name)
def test_a_route_is_in_order_and_has_all_that_its_tasks_need(route: Any) -> None:
    numbers = [task.id for task in CURRICULUM.tasks if task.id in route.tasks]
    assert list(route.tasks) == numbers
    for name in route.tasks:
        assert set(CURRICULUM.task(name).needs) <= set(route.tasks), name


def test_status_of_a_route(
    here: Course, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {route.name for route in CURRICULUM.routes} == {"ddp", "llm", "survive"}
    here.fill(FIRST, EXCHANGE)
    here.judged(FIRST)
    assert status(route="ddp") == 0
    said = capsys.readouterr().out
    assert f"1 of {len(CURRICULUM.route('ddp').tasks)}  route ddp" in said
    assert re.search(r"^next\b.*\b1\.2 ", said, re.MULTILINE)
    with pytest.raises(ValueError, match="sideways") as caught:
        status(route="sideways")
    assert all(route.name in str(caught.value) for route in CURRICULUM.routes)
    # After a gap it is the task that `start` and `watch` open, if the route has it.
    later = next(task for task in CURRICULUM.tasks if task.number == "1.5")
    monkeypatch.setattr("distlab.cli.status.next_task", lambda *_: later)
    assert status(route="ddp") == 0
    said = capsys.readouterr().out
    assert re.search(r"^next\b.*\b1\.5 ", said, re.MULTILINE)


def test_scores_of_hunts_and_of_tests_are_in_the_status(
    here: Course, capsys: Capture
) -> None:
    progress = Progress(here.root)
    progress.keep("hunts", {"1.7": {"open": "", "found": ["CO70"], "filled": []}})
    progress.keep("tests", {"collectives": {"caught": 3, "of": 188}})
    assert status() == 0
    said = capsys.readouterr().out
    assert re.search(r"^hunts: 1 of \d+\b", said, re.MULTILINE)
    assert re.search(r"\bcollectives: 3 of 188\b", said)


# ── the ranks of the snippets ───────────────────────────────────────────────────────


def unlike_sizes(comm: Comm) -> None:
    comm.all_reduce(torch.ones(1 if comm.rank else 8))


def unlike_order(comm: Comm) -> None:
    short, long = torch.ones(2), torch.ones(3)
    for tensor in (short, long) if comm.rank else (long, short):
        comm.all_reduce(tensor)


def unlike_dtypes(comm: Comm) -> None:
    comm.all_gather(
        torch.ones(2).to(TYPES[comm.rank]), torch.ones(1).to(TYPES[comm.rank])
    )


def unlike_calls(comm: Comm) -> None:
    if comm.rank:
        comm.all_reduce(torch.ones(1))
    else:
        comm.broadcast(torch.ones(1), 0)


def unlike_ends(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1)
    else:
        comm.recv(torch.ones(3), 0)


def not_waited_for(comm: Comm) -> None:
    comm.all_reduce(torch.ones(2), async_op=True)


TYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (unlike_sizes, ["all_reduce  [8]", "all_reduce  [1]"]),
        (unlike_order, ["all_reduce  [3]", "all_reduce  [2]"]),
        (unlike_dtypes, ["all_gather  [1] float32", "all_gather  [1] float64"]),
        (unlike_calls, ["broadcast  [1]", "all_reduce  [1]"]),
        (unlike_ends, ["send → 1  [2]", "recv ← 0  [3]"]),
        (not_waited_for, ["all_reduce", "all_reduce"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_that_do_not_fit_are_named_with_ranks_and_lines(
    program: Callable[[Comm], None], calls: list[str]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        tutor.on_ranks(2, program)
    lines = str(caught.value).splitlines()
    for rank, call in enumerate(calls):
        (line,) = [line for line in lines if line.startswith(f"  rank {rank} ")]
        assert call in line
        (number,) = re.findall(r"test_tutor\.py:(\d+)$", line)
        begin = program.__code__.co_firstlineno
        assert int(number) in range(begin, begin + 6)
    assert tutor.on_ranks(2, lambda comm: comm.rank) == [0, 1]
