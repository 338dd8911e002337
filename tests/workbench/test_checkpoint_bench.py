"""`distlab bench checkpoint` must be able to fail; and a few of what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _ckpt_damage as damage
from benchmarks import _ckpt_ranks as ranks
from benchmarks import checkpoint as bench
from benchmarks._bars import missed
from distlab.checkpoints.files import decode_manifest, manifest_name
from distlab.comm import RealDisk
from distlab.curriculum import load, load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.runner import Cluster
from distlab.training.ddp_code import as_parts

MISTAKES, KILLS = 60, 5
UNIT = load("fault_tolerance", "reference")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(preload=bench.PRELOAD) as started:
        yield started


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return as_parts(chosen_unit(load_curriculum(), "fault_tolerance", "reference"))


@pytest.fixture
def saved(cluster: Cluster, parts: dict[str, Any], tmp_path: Path) -> Path:
    return bench.saved_in(cluster, parts, str(tmp_path))


def test_torn_and_flipped_files_are_noticed(saved: Path) -> None:
    tally = damage.damaged(UNIT.load, saved, MISTAKES)
    assert tally.done == MISTAKES
    assert len(tally.files) == 2 * (damage.RANKS + 1)
    assert tally.missed == []


def test_a_load_without_checksums_is_found_out(saved: Path) -> None:
    load_anything = damage.without_checksums(UNIT)
    assert damage.damaged(load_anything, saved, MISTAKES).missed


def test_the_folder_is_whole_again_after_the_damage(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    damage.damaged(UNIT.load, saved, 20)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_pickle_in_the_place_of_a_shard_is_refused_in_one_line(saved: Path) -> None:
    import torch

    disk = RealDisk(saved)
    manifest = decode_manifest(disk.read(manifest_name(2)))
    torch.save({"layer 0": torch.ones(3)}, saved / manifest.files[1].name)
    found = UNIT.load(disk)
    assert found.step == 1
    (line,) = found.refused
    assert manifest.files[1].name in line
    assert "\n" not in line


def test_a_shard_opens_with_the_safetensors_package(saved: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for rank, record in enumerate(
        decode_manifest((saved / "step-2.json").read_bytes()).files
    ):
        found = safetensors.load_file(saved / record.name)
        right = ranks.state_of(rank, damage.SAVED_BYTES // damage.RANKS, 2)
        assert found.keys() == right.keys()
        assert all(found[name].equal(tensor) for name, tensor in right.items())


@pytest.mark.slow
def test_what_was_saved_outlives_ranks_that_are_killed_while_they_save(
    cluster: Cluster, parts: dict[str, Any], tmp_path: Path
) -> None:
    tally = damage.killed(
        cluster, UNIT.load, parts, tmp_path, KILLS, bench.KILLED_BYTES
    )
    assert tally.saving == KILLS
    assert tally.unloadable == []


def test_a_full_disk_warns_and_training_goes_on(
    cluster: Cluster, parts: dict[str, Any]
) -> None:
    lines = {line["name"]: line for line in bench.of_full_disk(cluster, parts)}
    assert lines["disk_full_steps_trained"]["value"] == 8
    assert lines["disk_full_warnings"]["value"] >= 1
    assert lines["disk_full_loaded_step"]["value"] == 8  # it is free again


def test_a_bar_that_is_missed_is_said() -> None:
    lines = [
        bench._line("stall_ratio_vs_sync", 0.2, "ours/peer"),
        bench._line("corruptions_missed", 1, what=["step-2.json"]),
        bench._line("corruptions", 2000, ""),
        bench._line("unloadable", 0, ""),
    ]
    assert missed(lines) == ["stall_ratio_vs_sync", "corruptions_missed"]
    told = "\n".join(bench.BENCH.text(lines))
    assert told.count("MISSED") == 2
    assert "step-2.json" in told
