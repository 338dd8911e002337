"""`distlab ddp --checkpoint`: resumed bit by bit, or refused in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.ddp import Order, ddp
from distlab.comm import RealDisk
from distlab.curriculum.choose import Choice
from distlab.given.checkpoint import manifest_steps
from distlab.runner import Cluster
from distlab.training.ddp import PRELOADS, DdpResult, train
from distlab.training.ddp_checkpoint import Checkpointing, RefusedError
from distlab.training.ddp_code import choose_saver, choose_units
from distlab.training.ddp_config import DdpConfig, Wishes, make_config

EVERY = 9  # of 23 steps in an epoch


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(preload=PRELOADS) as started:
        yield started


@pytest.fixture(scope="module")
def units() -> dict[str, Choice]:
    return choose_units(("reference",)) | choose_saver()


def config_of(n: int, **wishes: Any) -> DdpConfig:
    wanted = Wishes(world_size=n, epochs=2, momentum=0.9, device="cpu", **wishes)
    return replace(make_config(wanted, num_gpus=0), code=("reference",))


def trained(
    cluster: Cluster,
    units: dict[str, Choice],
    folder: Path,
    n: int = 2,
    *,
    resume: bool = False,
    **wishes: Any,
) -> tuple[DdpResult, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    order = Checkpointing(folder=str(folder), every=EVERY, resume=resume)
    result = train(
        cluster,
        config_of(n, **wishes),
        None,
        units,
        checkpointing=order,
        on_word=lambda *word: said.append(word),
    )
    return result, said


def forget(folder: Path, step: int) -> None:
    """As if the ranks had died before this checkpoint."""
    for path in folder.glob(f"step-{step}.*"):
        path.unlink()


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_training_goes_on_bit_by_bit_in_the_middle_of_an_epoch(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path, n: int
) -> None:
    whole, said = trained(cluster, units, tmp_path, n)
    assert said == []
    assert manifest_steps(RealDisk(tmp_path).names()) == [45, 46]
    forget(tmp_path, 46)
    resumed, said = trained(cluster, units, tmp_path, n, resume=True)
    ((kind, text),) = said
    assert kind == "checkpoint"
    assert {"45", str(tmp_path)} <= set(text.split())
    assert resumed.digests == whole.digests
    assert resumed.accuracies == whole.accuracies
    assert resumed.num_steps == whole.num_steps
    rows = [
        [(row.train_loss, row.loss, row.accuracy) for row in result.epochs]
        for result in (whole, resumed)
    ]
    assert rows[0] == rows[1]
    again, _ = trained(cluster, units, tmp_path, n, resume=True)  # nothing is left
    assert again.digests == whole.digests


def test_other_ranks_go_on(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    trained(cluster, units, tmp_path, 2)
    forget(tmp_path, 46)
    resumed, said = trained(cluster, units, tmp_path, 3, resume=True)
    ((kind, text),) = said
    assert kind == "checkpoint"
    assert {"45", str(tmp_path)} <= set(text.split())
    assert len(set(resumed.digests)) == 1


def test_another_training_is_refused_in_one_sentence(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    trained(cluster, units, tmp_path)
    with pytest.raises(RefusedError) as caught:
        trained(cluster, units, tmp_path, resume=True, seed=7)
    assert re.search(r"--seed 0\b.*\b7\b", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_torn_checkpoint_is_passed_over_and_said(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    whole, _ = trained(cluster, units, tmp_path)
    torn = next(tmp_path.glob("step-46.rank-1.*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed, said = trained(cluster, units, tmp_path, resume=True)
    assert resumed.digests == whole.digests
    (kind, text), *_ = said
    assert kind == "warning"
    assert torn.name in text


def test_a_pickle_is_refused_in_one_line(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(RefusedError, match=r"\bmodel\.pt\b.*pickle"):
        trained(cluster, units, tmp_path, resume=True)


def test_no_checkpoint_yet_is_no_error(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    _, said = trained(cluster, units, tmp_path / "new", resume=True)
    ((kind, text),) = said
    assert kind == "checkpoint"
    assert f"{tmp_path / 'new'} " in text
    assert text.endswith(" 0")


def test_a_folder_that_cannot_be_made_is_one_warning(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result, said = trained(cluster, units, tmp_path / "file" / "folder")
    assert len(set(result.digests)) == 1
    ((kind, text),) = said
    assert kind == "warning"
    assert str(tmp_path / "file") in text


def test_a_disk_that_is_full_for_a_while_is_one_warning_and_a_count(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    """On rank 1, in steps 18 and 27; a checkpoint of step 45 is there again."""
    saver = units["fault_tolerance"]
    write = "        write_file(disk, record.name, data)\n"
    assert saver.source.text.count(write) == 1
    full = (
        "        if comm.rank == 1 and step in (18, 27):\n"
        "            raise DiskError('the disk is full')\n"
    )
    text = saver.source.text.replace(write, full + write)
    broken = replace(saver, source=replace(saver.source, text=text, side="file"))
    result, said = trained(cluster, units | {"fault_tolerance": broken}, tmp_path)
    whole, _ = trained(cluster, units, tmp_path / "elsewhere")
    assert result.digests == whole.digests
    assert [kind for kind, _ in said] == ["warning", "warning"]
    assert re.search(r"\b18\b.*\brank 1: the disk is full$", said[0][1])
    assert re.search(r"\b2 of 6\b", said[1][1])
    assert manifest_steps(RealDisk(tmp_path).names()) == [45, 46]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_warning(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    result, said = trained(cluster, units, tmp_path)
    tmp_path.chmod(0o700)
    assert len(set(result.digests)) == 1
    assert [kind for kind, _ in said] == ["warning", "warning"]
    assert "Permission denied" in said[0][1]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"resume": True}, "--resume needs the folder"),
        ({"checkpoint_every": 3}, "--checkpoint-every needs the folder"),
        ({"checkpoint": ".", "checkpoint_every": 0}, "choose at least 1 step"),
        ({"checkpoint": "file"}, "is a file"),
        ({"checkpoint": "used"}, "--resume continues it"),
    ],
)
def test_flags_that_cannot_be(tmp_path: Path, order: dict[str, Any], says: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "step-3.json").write_text("")
    if "checkpoint" in order:
        order = order | {"checkpoint": tmp_path / order["checkpoint"]}
    with pytest.raises(ValueError, match=says):
        ddp(Wishes(), Order(**order))
