"""The corpus: small programs come to the same end wherever they run.

All of them in the simulator, a few on gloo and TCP; `distlab bench sim` runs them all
on all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from distlab.runner import Cluster, RankContext
from tests.corpora.programs.case import Case, cases_of, hangs, right
from tests.corpora.programs.corpus import CASES, MODULES, on_sim, transports
from tests.corpora.programs.judge import (
    Row,
    Verdict,
    judge,
    names_line,
    names_rank,
    plain,
    problems,
    verdict,
)

SAMPLE = {
    "domino": 5,
    "reply_to_who_asked": 3,
    "triangle": 3,
    "knot_around_anyone": 4,
    "waits_twice": 2,
    "ring_all_reduce": 4,
    "ring_with_uneven_chunks": 3,
    "late_for_a_broadcast": 3,
    "broadcast_without_one": 4,
    "reduce_without_one": 4,
    "async_in_another_order": 3,
    "pairs_in_a_circle": 3,
    "parameters_in_another_order": 2,
    "bad_sample_on_one_rank": 3,
}
# The mistake was made in a call that has long ended: nothing in the end points there.
NOT_NAMED = {"anyone_takes_what_was_meant_for_later"}


def case_of(name: str, world_size: int) -> Case:
    (case,) = (c for c in CASES if (c.name, c.world_size) == (name, world_size))
    return case


def named(case: Case) -> str:
    return f"{case.name}-{case.world_size}"


# ── every program ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_program_comes_to_its_end_in_the_simulator(case: Case) -> None:
    came = verdict(on_sim(case))
    assert problems(case, came) == []
    if not case.is_right:
        assert names_line(case, came) == (case.name not in NOT_NAMED)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_program_comes_to_the_same_end_everywhere(
    cluster: Cluster, name: str
) -> None:
    row = judge(case_of(name, SAMPLE[name]), transports(cluster))
    assert row.disagreements == []
    assert row.case.is_right or row.line_named


def test_there_are_enough_programs_of_both_kinds() -> None:
    programs = {case.name for case in CASES}
    buggy = {case.name for case in CASES if not case.is_right}
    assert len(programs) >= 50
    assert len(programs) // 2 <= len(buggy) <= len(programs) * 3 // 4
    assert {case.world_size for case in CASES} == {2, 3, 4, 5}
    assert len(NOT_NAMED) <= 0.05 * len({c.name for c in CASES if not c.is_right})


def test_no_program_is_twice_in_the_corpus() -> None:
    names = [(case.name, case.world_size) for case in CASES]
    assert len(set(names)) == len(names)
    assert sum(len(cases_of(module)) for module in MODULES) == len(CASES)


# ── what the harness rejects ────────────────────────────────────────────────────────


@right(2, gives=lambda rank, n: [1.0])
def off_by_one(ctx: RankContext) -> torch.Tensor:
    return torch.tensor([1.0 + ctx.rank])


@hangs(2)
def unmarked(ctx: RankContext) -> None:
    ctx.comm.recv(torch.zeros(1), 1 - ctx.rank)


@hangs(2)
def marked_elsewhere(ctx: RankContext) -> None:
    box = torch.zeros(1)  # guilty
    ctx.comm.recv(box, 1 - ctx.rank)


def only(program: Callable[..., Any]) -> Case:
    (case,) = program.__dict__["cases"]
    return case  # type: ignore[no-any-return]


WRONG = [
    (only(off_by_one), "rank 1 "),
    (only(unmarked), "guilty"),
    (replace(case_of("triangle", 3), outcome="finished"), "deadlock, "),
    (replace(case_of("domino", 2), outcome="deadlock"), "finished, "),
    (replace(case_of("domino", 2), slug="never-waited"), "never-waited"),
    (replace(case_of("never_waited", 2), slug=""), "never-waited"),
    (replace(case_of("one_raises", 2), error="OSError"), "KeyError, "),
    (replace(case_of("ping_pong", 2), gives=lambda rank, n: []), "[]"),
]


@pytest.mark.parametrize(("case", "named"), WRONG, ids=[case.name for case, _ in WRONG])
def test_a_wrong_expectation_is_a_disagreement(case: Case, named: str) -> None:
    row = judge(case, {"sim": on_sim})
    assert any(named in problem for problem in row.disagreements)


def test_a_line_that_is_not_in_the_verdict_is_not_named() -> None:
    case = only(marked_elsewhere)
    came = verdict(on_sim(case))
    assert problems(case, came) == []
    assert not names_line(case, came)
    assert not names_rank(case, came)


def row_of(case: Case, **changes: Any) -> Row:
    """The same program on two transports; the other one says something else."""
    came = verdict(on_sim(case))
    return Row(case=case, verdicts={"one": came, "other": replace(came, **changes)})


def shifted(came: Verdict) -> Any:
    return tuple(replace(line, where=f"{line.where}0") for line in came.evidence)


def test_transports_that_differ_disagree() -> None:
    case = case_of("triangle", 3)
    came = verdict(on_sim(case))
    assert row_of(case).disagreements == []
    changes: dict[str, Any] = {
        "waits_for": {},
        "cycle": (),
        "statuses": (),
        "message": "another one",
        "evidence": shifted(came),
        "values": [0, 0, 0],
    }
    for name, value in changes.items():
        (said,) = row_of(case, **{name: value}).disagreements
        assert said.startswith(f"other: {name}: ")
    assert not row_of(case, evidence=shifted(came)).line_named


def test_tensors_of_another_dtype_or_value_differ() -> None:
    one, other = torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert plain([one]) == plain([torch.ones(2)])
    assert plain([one]) != plain([other])
    assert plain([one]) != plain([torch.zeros(2)])
    case = case_of("ping_pong", 2)
    values = plain([torch.full((4,), 8.0, dtype=torch.float64)] * 2)
    (said,) = row_of(case, values=values).disagreements
    assert "float64" in said


def test_of_a_race_only_what_is_certain_is_compared() -> None:
    """Which of several ranks fails first is a race; what they raise is none."""
    case = case_of("no_such_root", 3)
    assert row_of(case, statuses=(), waits_for={0: (1,)}).disagreements == []
    assert row_of(case, error="OSError").disagreements
    anyhow = case_of("more_than_there_is_room_for", 2)
    assert row_of(anyhow, outcome="died", statuses=()).disagreements == []
    assert row_of(anyhow, slug="").disagreements
