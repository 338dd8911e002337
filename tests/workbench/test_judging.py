"""How a learner's file is judged: files that are none, and whose part a mistake is."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distlab.grading import TaskVerdict, verdict
from distlab.grading.kit.values import expect_values
from distlab.grading.parts import parts_beside, parts_used
from distlab.grading.report import lines_of, plain
from distlab.runner import Cluster
from tests.workbench.golden import Golden
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on, with_body

Judged = Callable[..., TaskVerdict]


@pytest.fixture
def judged(tmp_path: Path, cluster: Cluster) -> Judged:
    return functools.partial(verdict_on, cluster, tmp_path)


WHOLE = solution_of("collectives")


@pytest.mark.parametrize(
    ("text", "slug", "named"),
    [
        (WHOLE.replace("def broadcast(", "def brodcast("), "renamed", "broadcast"),
        (WHOLE.replace("-> None:", "-> None", 1), "syntax-error", "line "),
        (
            WHOLE.replace("tensor, dst=1", "tensor, dst=", 1),
            "syntax-error",
            "line ",
        ),
        (WHOLE + "   x = 1\n", "syntax-error", "line "),
        (WHOLE + "return 1\n", "syntax-error", "line "),
        (WHOLE.encode() + b"# \xe9t\xe9\n", "", "UTF-8"),
        (WHOLE.encode("utf-16"), "", "UTF-8"),
        (WHOLE + "\0", "syntax-error", "null"),
        ("x = " + "(" * 5000, "syntax-error", "line "),
        ("x = " + "-" * 100_000 + "1", "", "nested"),
        ("", "renamed", "empty"),
        ("# nothing yet\n", "renamed", "broadcast"),
        (None, "", "No such file"),
    ],
    ids=str.split(
        "renamed colon-forgotten call-unfinished indent return-outside latin-1 "
        "utf-16 null-byte brackets deep empty comment-only missing"
    ),
)
def test_a_file_that_is_none_is_a_clear_failure(
    text: str | bytes | None, slug: str, named: str, judged: Judged
) -> None:
    verdict = judged("collectives.broadcast", text, exit_code=1)
    assert (verdict.status, verdict.slug) == ("fail", slug), verdict.message
    assert named in verdict.message
    shown = plain(lines_of(verdict))
    assert "Traceback" not in shown
    assert "collectives.py" in shown


@pytest.mark.parametrize(
    ("addition", "part"),
    [
        ("undefined_name\n", "name 'undefined_name' is not defined"),
        ("import a_module_that_is_not_there\n", "ModuleNotFoundError"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import os\nos._exit(0)\n", "exited"),
        ("def broadcast(comm):\n    pass\n", "TypeError"),
    ],
    ids=["name", "import", "system-exit", "exit", "arguments"],
)
def test_a_file_that_fails_on_import_is_a_failure_too(
    addition: str, part: str, judged: Judged
) -> None:
    verdict = judged("collectives.broadcast", WHOLE + addition, exit_code=1)
    assert verdict.status == "fail"
    assert part in verdict.message


@pytest.mark.parametrize("encoded", ["utf-8-sig", "crlf"])
def test_marks_and_line_ends_of_other_systems_are_no_mistake(
    encoded: str, judged: Judged
) -> None:
    text = WHOLE.encode("utf-8-sig")
    if encoded == "crlf":
        text = WHOLE.replace("\n", "\r\n").encode()
    assert judged("collectives.broadcast", text).status == "pass"


# ── whose part it is ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("broken", "body", "graded"),
    [
        ("collectives.broadcast", "pass", "collectives.all_reduce"),
        (
            "collectives.broadcast",
            "comm.send(tensor, src)",
            "collectives.all_reduce",
        ),
        (
            "trainer.average_gradients",
            "for p in model.parameters():\n    comm.all_reduce(p.grad)",
            "trainer.train_step",
        ),
    ],
    ids=["wrong", "refused", "sum"],
)
def test_a_mistake_in_a_part_is_laid_at_that_part(
    broken: str, body: str, graded: str, judged: Judged
) -> None:
    unit, name = broken.split(".")
    verdict = judged(graded, with_body(solution_of(unit), broken, body))
    failure = verdict.first_failure()
    assert failure is not None
    assert re.search(rf"\b{name}\b", failure.rule)


def test_a_part_is_what_the_code_mentions_also_by_way_of_a_helper() -> None:
    functions = {"u.a": ("a",), "u.b": ("b",), "u.c": ("C.c",), "u.d": ("d",)}
    text = """
def a(comm): pass
def b(comm): comm.a()
def helper(comm): C().go(); a(comm)
class C:
    def go(self): self.c()
    def c(self): pass
def d(comm):
    helper(comm)
"""
    tree = ast.parse(text)
    assert parts_used(tree, "u.b", functions) == ()
    assert parts_used(tree, "u.c", functions) == ()
    assert parts_used(tree, "u.d", functions) == ("u.a", "u.c")


def test_a_part_is_also_what_the_same_object_does() -> None:
    functions = {"u.a": ("f",), "u.b": ("C.__iter__",), "u.c": ("C.state",)}
    text = """
def f(): pass
class C:
    def __iter__(self): return f()
    def state(self): return 0
"""
    tree = ast.parse(text)
    assert parts_used(tree, "u.c", functions) == ()
    assert parts_beside(tree, "u.c", ["u.b", "v.a"], functions) == ("u.a", "u.b")
    assert parts_beside(tree, "u.c", [], functions) == ()
    assert parts_beside(tree, "u.a", ["u.b"], functions) == ()


def test_a_mistake_of_ones_own_is_not_laid_at_a_part(judged: Judged) -> None:
    text = with_body(WHOLE, "collectives.all_reduce", "broadcast(comm, tensor, 0)")
    verdict = judged("collectives.all_reduce", text)
    failure = verdict.first_failure()
    assert failure is not None
    assert "broadcast" not in failure.rule


IF_RANK_0 = """
if comm.rank == 0:
    spare = torch.zeros_like(tensor)
    for src in range(1, comm.world_size):
        comm.recv(spare, src)
        tensor += spare
    broadcast(comm, tensor, 0)
else:
    comm.send(tensor, 0)
"""
DOUBLED = """
if comm.rank == 0:
    for src in range(1, comm.world_size):
        comm.recv(tensor, src)
        tensor += tensor
else:
    comm.send(tensor, 0)
broadcast(comm, tensor, 0)
"""


MISTAKES = {
    "exchange without a receiver": "if comm.rank == 0:\n    comm.send(tensor, 1)",
    "arguments in another order": "comm.sendrecv(tensor, tensor, 0, 1)",
    "a tensor for a rank": "comm.send(tensor, tensor)",
    "input": "input()",
    "a call in a call": "comm.send(comm.send(tensor, 1), 1) / 2",
    "printed": "print('seen')\ntensor += comm.rank",
}


def test_a_verdict_says_what_to_do(judged: Judged, golden: Golden) -> None:
    cases = [("exchange", title, body) for title, body in MISTAKES.items()]
    cases += [("all_reduce", "one rank calls broadcast", IF_RANK_0)]
    cases += [("all_reduce", "doubled", DOUBLED)]
    said, failures = [], {}
    for task, title, body in cases:
        text = with_body(WHOLE, f"collectives.{task}", body)
        verdict = judged(f"collectives.{task}", text, exit_code=1)
        failure = failures[title] = verdict.first_failure()
        assert failure is not None
        # Which of several ranks is heard of first is a race.
        message = re.sub(r"\brank \d", "rank r", failure.message)
        said.append(f"{title} [{verdict.slug}]\n  {message}\n  {failure.rule}")
    text = re.sub(r"(py:|line )\d+", r"\1<line>", "\n".join(said))
    golden("grading/verdicts_of_phase_1", text)
    doubled, printed = failures["doubled"], failures["printed"]
    assert doubled is not None
    assert re.search(r"\b1 .*\b200 .*\b111\b", doubled.evidence[0].text)
    line = failures["one rank calls broadcast"]
    assert line is not None
    assert re.search(r"^line \d+ .*\b0\b.*\b1\b", line.rule)
    assert printed is not None
    assert "[rank 0] seen" in printed.output


def test_the_line_named_is_that_of_the_rank_that_failed(judged: Judged) -> None:
    body = "if comm.rank == 0:\n    comm.send(tensor, 1)\nelif comm.rank == 1:\n"
    text = with_body(WHOLE, "collectives.exchange", f"{body}    comm.recv(tensor, 9)")
    verdict = judged("collectives.exchange", text, worlds=(2,))
    guilty = text.splitlines().index("        comm.recv(tensor, 9)") + 1
    assert (
        plain(lines_of(verdict)).splitlines()[-2].endswith(f"collectives.py:{guilty}")
    )


def test_a_mistake_without_a_name_ends_with_the_advice_on_its_clause(
    judged: Judged,
) -> None:
    right, wrong = "mean += bucket.shard.grad", "mean += 2 * bucket.shard.grad"
    text = solution_of("sharded_optimizer").replace(right, wrong)
    failure = judged("sharded_optimizer.stage2", text).first_failure()
    assert failure
    assert not failure.slug
    task = CURRICULUM.task("sharded_optimizer.stage2")
    assert failure.rule == task.advice[failure.id]


def test_from_the_networks_on_each_clause_has_advice() -> None:
    phases = [phase for phase in CURRICULUM.phases if phase.number in (3, 4)]
    first = {3: 9, 4: 1}
    tasks = [
        task
        for phase in phases
        for unit in phase.units
        for task in unit.tasks
        if int(task.number.partition(".")[2]) >= first[phase.number]
    ]
    for task in tasks:
        assert task.advice.keys() == task.clauses.keys(), task.id
    assert verdict.STANDING_ADVICE.keys() == verdict.STANDING.keys()
    lines = [*verdict.STANDING_ADVICE.values()]
    lines += [line for task in tasks for line in task.advice.values()]
    assert max(map(len, lines)) <= 84
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(("planted", "kinds"), [(1.0, ""), ("inf", "inf")])
def test_the_evidence_says_that_an_inf_is_the_checks_own(
    planted: float | str, kinds: str
) -> None:
    right = torch.tensor([float(planted), 2.0])
    wrong = torch.tensor([float(planted), 7.0])
    with pytest.raises(verdict.NotYetError) as found:
        expect_values([right, wrong], [right, right], what="the mean")
    given = [line for line in found.value.evidence if line.rank < 0]
    assert [kinds in line.text for line in given] == [True] * bool(kinds)
    assert len(found.value.evidence) == 2 + len(given)
