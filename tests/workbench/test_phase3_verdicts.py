"""What learners read about mistakes of phase 3: short, and no more than is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distlab.grading.catalogue import Entry
from distlab.grading.checks.ring_allreduce.counts import counted, digits, in_words
from distlab.grading.kit.live_bytes import FreedMemoryError, LiveBytes
from distlab.grading.mutants import judge
from distlab.grading.report import lines_of, plain
from distlab.runner import Cluster
from tests.workbench.golden import Golden
from tests.workbench.judging import CURRICULUM, verdict_on_entry


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 1, 1], "0+1+2"),
        ([0, 0, 8], "2 (8×)"),
        ([2, 0, 1], "0 (2×)+2"),
        ([1, 0, -1], "0−2"),
        ([-1, 1, 0], "−0+1"),
        ([0, 10, -5], "1 (10×)−2 (5×)"),
        ([0, 0, 0], "no rank"),
    ],
)
def test_who_is_in_a_sum_is_told_in_few_words(counts: list[int], words: str) -> None:
    total = sum(
        (times * digits(rank, 2) for rank, times in enumerate(counts)),
        torch.zeros(2, dtype=torch.int64),
    )
    assert counted(total, 3) == [counts]
    assert in_words(counts) == words


def test_a_wrong_sign_shows_as_a_sign(
    cluster: Cluster, tmp_path: Path, golden: Golden
) -> None:
    verdict = verdict_on_entry(cluster, tmp_path, "RA52")
    shown = plain(lines_of(verdict))
    assert "−" in shown
    assert not re.search(r"\d\+(\d)\+\1", shown)
    golden("grading/a_wrong_sign", verdict.message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clause"),
    [
        ("RA31", "C2"),
        ("TO23", "C3"),
        ("TO61", "C2"),
        ("TO64", "C3"),
        ("GB43", "C2"),
        ("GB40", "C3"),
        ("GB60", "C3"),
        ("GB84", "C3"),
        ("ZR07", "C2"),
    ],
)
def test_a_clause_that_fails_for_anothers_mistake_is_not_judged(
    name: str, clause: str, cluster: Cluster, tmp_path: Path
) -> None:
    verdict = verdict_on_entry(cluster, tmp_path, name)
    assert verdict.status == "fail"
    assert {c.id: c.status for c in verdict.clauses}[clause] == "skip"


@pytest.mark.parametrize("name", ["TO04", "TO41", "ZR19", "RA03", "GB03"])
def test_where_no_ranks_are_none_are_named(
    name: str, cluster: Cluster, tmp_path: Path
) -> None:
    shown = plain(lines_of(verdict_on_entry(cluster, tmp_path, name)))
    assert "NOT YET" in shown
    assert not re.search(r"\bn = 1\b|\branks? (0|-1)\b", shown)


def test_a_plan_that_never_ends_is_the_code_s_and_no_rank_s(cluster: Cluster) -> None:
    entry = Entry(
        id="XX01", task="topology.choose", title="", clause="C1",
        body="while True:\n    pass\n", limit_s=1.0,
    )  # fmt: skip
    (result,) = judge(CURRICULUM, cluster, [entry])
    assert result.slug == "spinning"
    assert re.search(r"\b1 s\b.*XX01_topology\.py:\d+", result.message)
    assert "rank" not in result.message


@pytest.mark.parametrize("name", ["ZR65", "ZR66", "ZR68"])
def test_freed_memory_is_named_before_it_is_read(
    name: str, cluster: Cluster, tmp_path: Path
) -> None:
    verdict = verdict_on_entry(cluster, tmp_path, name)
    assert verdict.slug == "freed-under-a-view"
    assert "SIGSEGV" not in plain(lines_of(verdict))


def freed() -> tuple[Tensor, Tensor]:
    whole = torch.arange(6.0)
    part = whole.chunk(2)[1]
    whole.untyped_storage().resize_(0)
    return whole, part


def test_operations_on_freed_memory_are_refused() -> None:
    whole, part = freed()
    with LiveBytes():
        for act in (
            part.clone,
            lambda: part[0].item(),
            part.sum,
            lambda: part.copy_(torch.ones(3)),
        ):
            with pytest.raises(FreedMemoryError, match="freed"):
                act()
        with pytest.raises(FreedMemoryError):
            torch.cat([torch.ones(1), part])
        kinds = torch.empty_like(part), torch.zeros_like(part), part.new_zeros(3)
        assert [len(tensor) for tensor in kinds] == [3, 3, 3]
        assert part.detach().shape == (3,)
        with pytest.raises(FreedMemoryError, match="split"):
            whole.chunk(2)
        whole.untyped_storage().resize_(whole.nbytes)
        assert part.zero_().tolist() == [0.0, 0.0, 0.0]
