"""Slips made by machine: that they are slips, and that the autograder sees them.

Here a sample of them is graded; all of them: `make mutants`.
"""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distlab.cli import mutants as command
from distlab.curriculum import Curriculum, Task, load_curriculum
from distlab.grading.catalogue import RECORDS, CatalogueError, Entry
from distlab.grading.generated import (
    Outcome,
    generate,
    judge_generated,
    read_reasons,
)
from distlab.grading.generated_mutants import Mutation, mutations_of
from distlab.runner import Cluster

ROOT = Path(__file__).parents[2]
CURRICULUM = load_curriculum(ROOT)
ENTRY = Entry(id="CO01", task="collectives.exchange", title="", body="", clause="C1")
SAMPLE = 5
FAST = ("collectives", "trainer.broadcast_model", "trainer.train_step")


@functools.cache
def sample() -> list[Mutation]:
    tasks = [task for task in CURRICULUM.tasks if task.id.startswith(FAST)]
    reasons = tomllib.loads((ROOT / RECORDS / "survivors.toml").read_text("utf-8"))
    alive = {what for row in reasons["survivors"] for what in row["what"]}
    # An endless loop would cost its whole time limit: the full run has those.
    slips = [
        slip
        for slip in generate(CURRICULUM, tasks)
        if "while" not in slip.what and "reach *= 2" not in slip.what
        if slip.what not in alive
    ]
    return random.Random(20).sample(slips, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SAMPLE))
def test_the_grader_sees_a_slip(cluster: Cluster, number: int) -> None:
    slip = sample()[number]
    (outcome,) = judge_generated(CURRICULUM, cluster, [slip], {})
    assert outcome.is_right, f"{slip.task}: {slip.what}: {outcome.message}"


# ── the slips themselves ────────────────────────────────────────────────────────────


def slips(body: str) -> tuple[Mutation, ...]:
    """All slips in a solution with this body in its region."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = (
        "def work(comm, src, dst, items, x):\n    ### BEGIN SOLUTION unit.task\n"
        f"{lines}    ### END SOLUTION\n    return x\n"
    )
    return mutations_of(text, "unit.task")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if x < 3:\n    x += 1", "if x < 3: → if x <= 3:"),
        ("if x < 3:\n    x += 1", "if x < 3: → if not x < 3:"),
        ("if x == 3:\n    x += 1", "if x == 3: → if x != 3:"),
        ("x = 3", "x = 3 → x = 4"),
        ("x = 3", "x = 3 → x = 2"),
        ("x = [i for i in range(x)]", "→ x = [i for i in range(x - 1)]"),
        ("for i in range(x):\n    items.add(i)", "→ for i in range(1, x):"),
        ("for i in items:\n    x += i", "→ for i in list(items)[1:]:"),
        ("for i in items:\n    x += i", "→ for i in list(items)[:-1]:"),
        ("for i in items:\n    x += i", "break after x += i"),
        ("x += 1\nitems.add(x)", "items.add(x) → nothing"),
        ("x += 1\nitems.add(x)", "return after x += 1"),
        ("x += 1", "x += 1 → x -= 1"),
        ("x += 1", "x += 1 → x = x + 1"),
        ("x = src / dst", "x = src / dst → x = src * dst"),
        ("x = src / dst", "x = src / dst → x = dst / dst"),
        ("x = src % 5", "x = src % 5 → x = src"),
        ("x = comm.rank", "x = comm.rank → x = 0"),
        ("x = comm.world_size", "x = comm.world_size → x = 2"),
        ("x.div_(comm.size)", "x.div_(comm.size) → x.div(comm.size)"),
        ("work = x.send(items, dst)\nwork.wait()", "work.wait() → nothing"),
        ("x.send(items, dst)", "x.send(items, dst) → x.send(dst, items)"),
        ("x.reduce(async_op=True)", "x.reduce(async_op=True) → x.reduce()"),
        ("x = src and dst", "x = src and dst → x = src or dst"),
        ("x = not dst", "x = not dst → x = dst"),
        ("x = src if dst else 5", "x = src if dst else 5 → x = src"),
        ("with x.lock():\n    x += 1", "with x.lock(): ⏎ x += 1 → x += 1"),
    ],
)
def test_a_slip_of_each_kind_is_made(body: str, expected: str) -> None:
    assert any(expected in slip.what for slip in slips(body)), [
        slip.what for slip in slips(body)
    ]


@pytest.mark.slow
def test_no_slip_is_the_solution_and_no_two_are_the_same() -> None:
    for task in {task.unit: task for task in CURRICULUM.tasks}.values():
        path = CURRICULUM.units[task.unit].solution(ROOT)
        solution = path.read_text(encoding="utf-8")
        made = mutations_of(solution, task.id)
        assert len(made) >= 5, task.id
        assert len({slip.id for slip in made}) == len(made)
        bodies = {slip.applied_to(solution) for slip in made}
        assert len(bodies) == len(made)
        trees = {ast.dump(ast.parse(text)) for text in sorted(bodies)[:5]}
        assert ast.dump(ast.parse(solution)) not in trees
        assert len(trees) == 5


# ── reasons ─────────────────────────────────────────────────────────────────────────


def entry(task: str, why: str, what: str) -> str:
    return (
        f"[[survivors]]\ntask = {json.dumps(task)}\nwhy = {json.dumps(why)}\n"
        f"what = [{json.dumps(what)}]\n"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            entry("collectives.exchange", "so", "no such slip"),
            "collectives.exchange .*no such slip",
        ),
        (entry("collectives.nothing", "so", "x"), "collectives.nothing .* x$"),
        ("survivors = 3\n", "survivors.toml"),
        ("[[survivors]\n", "survivors.toml"),
        ('[[survivors]]\ntask = "collectives.exchange"\n', "what"),
    ],
)
def test_a_reason_for_nothing_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CatalogueError, match=complaint):
        read_reasons(CURRICULUM, path)


def test_a_reason_must_be_given(tmp_path: Path) -> None:
    slip = generate(CURRICULUM, [CURRICULUM.task("collectives.exchange")])[0]
    path = tmp_path / "survivors.toml"
    path.write_text(entry(slip.task, " ", slip.what), encoding="utf-8")
    with pytest.raises(CatalogueError, match=re.escape(slip.what)):
        read_reasons(CURRICULUM, path)


def outcome(status: str, why: str = "") -> Outcome:
    slip = Mutation(task="collectives.exchange", function="f", line=1, what="", body="")
    return Outcome(
        mutation=slip,
        status=status,
        clause="",
        slug="",
        message="",
        seconds=0.0,
        why=why,
    )


def test_only_a_survivor_needs_a_reason_and_only_a_survivor_may_have_one() -> None:
    assert outcome("fail").is_right
    assert outcome("pass", why="as right").is_right
    assert not outcome("pass").is_right
    assert not outcome("fail", why="as right").is_right
    assert not outcome("error").is_right
    assert not outcome("error", why="as right").is_right


# ── the command ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the command see these outcomes, without running anything."""

    def use(*outcomes: Outcome) -> None:
        monkeypatch.setattr("distlab.grading.mutants.judge", lambda *_: [])
        one_entry = lambda _: [ENTRY]  # noqa: E731
        monkeypatch.setattr("distlab.grading.catalogue.read_catalogue", one_entry)
        slips, reasons = [outcomes[0].mutation], {"x": "y"}

        def generate_all(_: Curriculum, tasks: Sequence[Task]) -> list[Mutation]:
            assert [*tasks] == [*CURRICULUM.tasks]
            return slips

        # The real ones take half a minute, and other tests are about them.
        monkeypatch.setattr("distlab.grading.generated.generate", generate_all)
        monkeypatch.setattr("distlab.grading.generated.read_reasons", lambda _: reasons)

        def judge(*values: object) -> list[Outcome]:
            assert values[2:4] == (slips, reasons)
            if callable(tell := values[-1]):
                for one in outcomes:
                    tell(one)
            return list(outcomes)

        monkeypatch.setattr("distlab.grading.generated.judge_generated", judge)

    return use


def test_command_fails_for_a_survivor_without_a_reason(
    graded: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    graded(outcome("fail"), outcome("pass", why="as right"))
    assert command.mutants(generated=True) == 0
    assert "as right" in capsys.readouterr().out
    graded(outcome("fail"), outcome("pass"))
    assert command.mutants(generated=True) == 1
    assert "SURVIVED" in capsys.readouterr().out
    graded(outcome("fail", why="as right"))
    assert command.mutants(generated=True) == 1
    assert "KILLED" in capsys.readouterr().out
    graded(outcome("error"))
    assert command.mutants(generated=True) == 11


def test_command_adds_the_slips_to_its_json(
    graded: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    graded(replace(outcome("fail"), clause="C1", slug="raised", seconds=0.5))
    assert command.mutants(generated=True, as_json=True) == 0
    (slip,) = json.loads(capsys.readouterr().out)["generated"]
    assert slip.pop("id").startswith("G")
    assert slip == {
        "task": "collectives.exchange",
        "line": 1,
        "what": "",
        "killed": True,
        "clause": "C1",
        "slug": "raised",
        "seconds": 0.5,
        "why": "",
    }


# ── the readme ──────────────────────────────────────────────────────────────────────


def test_readme_is_written_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / command.COUNTS
    path.parent.mkdir(parents=True)
    path.write_text(f"above\n{command.BEGIN}old\n{command.END}below\n")
    there: Curriculum = replace(CURRICULUM, root=tmp_path)
    monkeypatch.setattr(command, "load_curriculum", lambda: there)
    monkeypatch.setattr(command, "readme_table", lambda _: "new\n")
    assert command.write_readme() == 0
    assert path.read_text() == f"above\n{command.BEGIN}new\n{command.END}below\n"
