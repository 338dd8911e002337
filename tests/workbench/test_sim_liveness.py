"""Hangs are looked for in the kernel first, and judged on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlab.curriculum.units import read_source
from distlab.grading.checks.collectives import all_reduce, pairs
from distlab.grading.clause import checks_of
from distlab.grading.grade import Grader
from distlab.grading.harness import Implementation
from distlab.grading.liveness import (
    SIZES,
    RiskySizes,
    _is_suspicion,
    _sizes_for,
    in_order,
    risky_sizes,
)
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
from distlab.runner import Cluster, Limits
from tests.workbench.judging import CURRICULUM, SEED, catalogue, solution_of, with_body

ENTRIES = catalogue()
ODD_SIZES = {"LV01": 5, "LV02": 8, "LV03": 6}
TRIED = {n for module in (all_reduce, pairs) for n in module.WORLDS}


def judged(cluster: Cluster, folder: Path, task_id: str, text: str) -> TaskVerdict:
    path = folder / "collectives.py"
    path.write_text(text)
    grader = Grader(CURRICULUM, cluster, code=str(path), seed=SEED)
    return grader.grade([CURRICULUM.task(task_id)]).tasks[0]


def failed(verdict: TaskVerdict) -> ClauseVerdict:
    clause = verdict.first_failure()
    assert clause is not None
    return clause


@pytest.mark.parametrize("name", ODD_SIZES)
def test_a_hang_at_a_size_that_no_check_tries_is_found(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    entry, size = ENTRIES[name], ODD_SIZES[name]
    assert size not in TRIED
    text = entry.applied_to(solution_of("collectives"))
    clause = failed(judged(cluster, tmp_path, entry.task, text))
    assert (clause.world_size, clause.kind, clause.slug) == (
        size,
        "DEADLOCK",
        entry.slug,
    )
    assert len(clause.evidence) == size
    waiting = [line for line in clause.evidence if line.state == "waiting"]
    assert waiting
    assert all("collectives.py:" in line.where for line in waiting)


def test_without_the_kernel_nobody_finds_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.grading.grade.risky_sizes", lambda *_: {})
    entry = ENTRIES["LV01"]
    text = entry.applied_to(solution_of("collectives"))
    assert judged(cluster, tmp_path, entry.task, text).status == "pass"


SHARED = """
if not hasattr(Comm, "first"):
    Comm.first = comm.rank
if comm.rank == Comm.first or comm.world_size == 1:
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    comm.sendrecv(outgoing, right, incoming, left)
"""

THREADED = """
from concurrent.futures import ThreadPoolExecutor
right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
with ThreadPoolExecutor(1) as pool:
    pool.submit(comm.sendrecv, outgoing, right, incoming, left).result()
"""

SPINNING_AT_SIX = """
while comm.world_size == 6:
    pass
right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
comm.sendrecv(outgoing, right, incoming, left)
"""

LEAVING_AT_SIX = SPINNING_AT_SIX.replace(
    "while comm.world_size == 6:\n    pass",
    "import os\nif comm.world_size == 6:\n    os._exit(0)",
)


@pytest.mark.slow
@pytest.mark.parametrize("body", [SHARED, THREADED])
def test_where_real_ranks_disagree_they_are_right(
    cluster: Cluster, tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that ranks share in one process, and threads: the kernel errs in both."""
    found: list[RiskySizes] = []

    def listen(*args: Any) -> RiskySizes:
        found.append(risky_sizes(*args))
        return found[-1]

    monkeypatch.setattr("distlab.grading.grade.risky_sizes", listen)
    text = with_body(solution_of("collectives"), "collectives.pass_around", body)
    verdict = judged(cluster, tmp_path, "collectives.pass_around", text)
    assert found[0]  # the kernel did suspect it
    assert (verdict.status, verdict.message) == ("pass", "")


@pytest.mark.slow
@pytest.mark.parametrize("body", [SPINNING_AT_SIX, LEAVING_AT_SIX])
def test_what_the_kernel_cannot_run_is_left_to_real_ranks(
    cluster: Cluster, tmp_path: Path, body: str
) -> None:
    text = with_body(solution_of("collectives"), "collectives.pass_around", body)
    verdict = judged(cluster, tmp_path, "collectives.pass_around", text)
    assert (verdict.status, verdict.message) == ("pass", "")
    assert set(verdict.world_sizes) == TRIED


def test_a_wrong_number_is_not_the_kernels_concern(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Only what does not end is suspected; what a check says of values is left out."""
    body = "tensor.zero_()"
    text = with_body(solution_of("collectives"), "collectives.all_reduce", body)
    clause = failed(judged(cluster, tmp_path, "collectives.all_reduce", text))
    assert (clause.id, clause.world_size) == ("C1", 3)


def test_a_check_keeps_its_own_order() -> None:
    """exchange is judged with two ranks first, where a wrong rank is named as such."""
    assert list(SIZES) == [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = checks_of("collectives.exchange")
    assert _sizes_for(first) == [2, 3, 4, 7, 1, 5, 6, 8]
    assert _sizes_for(second) == [2, 3, 4, 7, 5, 6, 8]  # nothing is said of one rank


def test_the_world_size_of_a_verdict_is_the_checks_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    entry = ENTRIES["CO11"]
    text = entry.applied_to(solution_of("collectives"))
    clause = failed(judged(cluster, tmp_path, entry.task, text))
    assert (clause.world_size, clause.slug) == (2, "no-such-rank")


WRONG_AT_THREE = """
right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
if comm.world_size == 4:
    comm.send(outgoing, right)
comm.sendrecv(outgoing, right, incoming, left)
if comm.world_size == 3:
    incoming.zero_()
"""


def test_a_hang_does_not_hide_what_is_wrong_before(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = with_body(
        solution_of("collectives"), "collectives.pass_around", WRONG_AT_THREE
    )
    clause = failed(judged(cluster, tmp_path, "collectives.pass_around", text))
    assert (clause.id, clause.world_size, clause.kind) == ("C1", 3, "NOT YET")


@pytest.mark.parametrize(
    ("told", "is_ours"),
    [
        ([0, 5], True),
        ([0, 500], False),
        ([0, "5"], False),
        ([0, True], False),
        ([0], False),
        ((0, 5), False),
        (None, False),
    ],
)
def test_only_a_suspicion_of_ours_counts(told: Any, is_ours: bool) -> None:
    assert _is_suspicion(told) is is_ours


def test_other_units_are_not_looked_at(cluster: Cluster) -> None:
    source = read_source(CURRICULUM, CURRICULUM.units["trainer"], "reference")
    impl = Implementation(source, source)
    task = "trainer.average_gradients"
    assert risky_sizes(cluster, task, impl, SEED, Limits()) == {}


@pytest.mark.parametrize(
    ("suspected", "order"),
    [
        ((), (3, 2, 4, 7, 1)),
        ((2,), (2, 3, 4, 7, 1)),
        ((7, 3), (3, 7, 2, 4, 1)),
        ((5, 6), (5, 3, 2, 4, 7, 1)),
        ((5, 4), (4, 3, 2, 7, 1)),
    ],
)
def test_what_is_suspected_is_looked_at_first(
    suspected: tuple[int, ...], order: tuple[int, ...]
) -> None:
    assert in_order((3, 2, 4, 7, 1), suspected) == order


def test_every_check_of_the_unit_is_played() -> None:
    tasks = [task for task in CURRICULUM.tasks if task.unit == "collectives"]
    assert all(checks_of(task.id) for task in tasks)
