"""The kernel and gloo agree: how a program ends, who waits for whom, and where."""

from __future__ import annotations

from typing import Any

import pytest

from distlab.runner import Cluster, Limits
from distlab.runner.board import Board
from distlab.sim import run as simulate
from tests.corpora.programs import hangs
from tests.corpora.programs.case import cases_of
from tests.corpora.programs.corpus import CASES as CORPUS
from tests.corpora.programs.judge import verdict

CASES = [(case.program, case.world_size) for case in cases_of(hangs)]
ALL = [(case.program, case.world_size) for case in CORPUS]
LIMITS = Limits(seconds=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "n"), CASES, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_the_kernel_judges_as_gloo_does(cluster: Cluster, program: Any, n: int) -> None:
    real = cluster.run(program, n, limits=LIMITS)
    simulated = simulate(program, n, limits=LIMITS)
    assert verdict(simulated) == verdict(real)


@pytest.mark.parametrize(
    ("program", "n"), ALL, ids=lambda case: getattr(case, "__name__", str(case))
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
