"""A training that is stopped goes on bit by bit, and each item of its state counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.runner import Cluster
from distlab.training import resumed as program
from distlab.training.ddp_code import as_parts

STOP, LAST = 9, 20
BF16, FP16 = "bfloat16", "float16"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(preload=("torch._dynamo", program.__name__)) as started:
        yield started


@pytest.fixture(scope="module")
def units() -> dict[str, dict[str, Any]]:
    names = (*program.UNITS, "fault_tolerance")
    curriculum = load_curriculum()
    return {n: as_parts(chosen_unit(curriculum, n, "reference")) for n in names}


def apart(
    cluster: Cluster,
    units: dict[str, dict[str, Any]],
    folder: Path,
    n: int,
    half: str,
    without: str = "",
) -> set[tuple[int | None, int | None]]:
    """Where weights and held-out outputs part, on each rank; in new processes."""
    if not any(folder.iterdir()):
        how = half, STOP, LAST
        run = cluster.run(program.unbroken, n, units, str(folder), *how)
        KEPT[folder] = run.require_finished().values
    run = cluster.run(program.resumed, n, units, str(folder), half, LAST, without)
    pairs = zip(KEPT[folder], run.require_finished().values, strict=True)
    return {program.parts_at(one, other) for one, other in pairs}


KEPT: dict[Path, Any] = {}


@pytest.mark.parametrize(
    ("n", "half"),
    [
        (2, BF16),
        (3, FP16),
        pytest.param(2, FP16, marks=pytest.mark.slow),
        pytest.param(3, BF16, marks=pytest.mark.slow),
    ],
)
def test_resumed_in_new_processes_is_bit_equal(
    cluster: Cluster, units: dict[str, Any], tmp_path: Path, n: int, half: str
) -> None:
    assert apart(cluster, units, tmp_path, n, half) == {(None, None)}


def test_each_item_of_the_state_is_needed(
    cluster: Cluster, units: dict[str, Any], tmp_path: Path
) -> None:
    found = {
        item: apart(cluster, units, tmp_path, 2, BF16, item) for item in program.ITEMS
    }
    first = STOP + 1
    at_once: dict[str, set[tuple[int | None, int | None]]]
    at_once = {key: {(first, first)} for key in program.ITEMS}
    # The optimizer has the learning rate of the first step; the schedule the others.
    at_once["scheduler"] = {(first + 1, first + 1)}
    at_once["buffers"] = {(None, first)}  # batch norm trains with those of the batch
    assert found == at_once


def test_a_loss_scale_that_is_not_loaded_shows_at_an_overflow(
    cluster: Cluster, units: dict[str, Any], tmp_path: Path
) -> None:
    ((weights, outputs),) = apart(cluster, units, tmp_path, 2, FP16, program.SCALER)
    assert weights is not None
    assert weights == outputs
    assert weights > STOP + 1
