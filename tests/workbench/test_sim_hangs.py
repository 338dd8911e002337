"""The kernel and gloo agree: how a program ends, who waits for whom, and where."""

from __future__ import annotations

from typing import Any

import pytest

from distlab.grading.diagnosis import diagnose, diagnose_finished
from distlab.grading.verdict import NotYetError
from distlab.runner import Cluster, Limits, Run
from distlab.runner.board import Board
from distlab.sim import run as simulate
from tests.workbench.conformance import hangs

CASES = [(program, n) for program, ns in hangs.PROGRAMS.items() for n in ns]
LIMITS = Limits(seconds=20)


def verdict(run: Run) -> tuple[Any, ...]:
    """What a learner would be told."""
    try:
        if run.outcome != "finished":
            raise diagnose(run)
        diagnose_finished(run)
    except NotYetError as failure:
        lines = [
            (line.rank, line.state, line.text, line.where) for line in failure.evidence
        ]
        return failure.message, failure.slug, failure.kind, failure.rule, lines
    return ()


@pytest.mark.parametrize(
    ("program", "n"), CASES, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_the_kernel_judges_as_gloo_does(cluster: Cluster, program: Any, n: int) -> None:
    real = cluster.run(program, n, limits=LIMITS)
    simulated = simulate(program, n, limits=LIMITS)
    assert simulated.outcome == real.outcome
    assert simulated.waits_for == real.waits_for
    assert simulated.cycle == real.cycle
    assert [r.status for r in simulated.ranks] == [r.status for r in real.ranks]
    assert simulated.values == real.values
    assert verdict(simulated) == verdict(real)


@pytest.mark.parametrize(
    ("program", "n"), CASES, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_the_kernels_graph_is_the_one_in_the_journals(program: Any, n: int) -> None:
    """Two ways to know who waits: what the kernel holds, and what the ranks wrote."""
    done = simulate(program, n, limits=LIMITS)
    board = Board(n, LIMITS.seconds)
    for record in done.ranks:
        for event in record.journal:
            board.record(record.rank, event)
    alive = [record.rank for record in done.ranks if record.status == "waiting"]
    assert (board.stuck(alive) or {}) == done.waits_for
    for rank in alive:
        assert board.blocked_in(rank) == done.ranks[rank].waiting


def test_the_corpus_has_both_kinds() -> None:
    ends = [simulate(program, n, limits=LIMITS).outcome for program, n in CASES]
    assert len(CASES) >= 50
    assert len([end for end in ends if end != "finished"]) >= len(CASES) // 2
    assert ends.count("finished") >= 10
