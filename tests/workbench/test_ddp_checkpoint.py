"""`distlab ddp --checkpoint`: resumed bit by bit, or refused in one sentence."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.checkpoints.files import manifest_steps
from distlab.cli import ddp_verb
from distlab.cli.checkpoint import checkpoint
from distlab.cli.ddp import Order, ddp
from distlab.cli.ddp import _check as check
from distlab.comm import RealDisk
from distlab.curriculum.choose import Choice
from distlab.dcp.runs import steps_in
from distlab.runner import Cluster
from distlab.training.ddp import PRELOADS, DdpResult, train
from distlab.training.ddp_checkpoint import FREE, Checkpointing, RefusedError
from distlab.training.ddp_code import choose_saver, choose_units
from distlab.training.ddp_config import DdpConfig, Wishes, make_config
from distlab.training.ddp_data import locate

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
    is_dcp: bool = False,
    **wishes: Any,
) -> tuple[DdpResult, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    order = Checkpointing(folder=str(folder), every=EVERY, resume=resume, is_dcp=is_dcp)
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


def test_a_training_goes_on_from_dcp_folders_and_from_converted_ones(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    folder, back = tmp_path / "dcp", tmp_path / "back"
    whole, said = trained(cluster, units, folder, 3, is_dcp=True)
    assert said == []
    assert steps_in(folder) == [45, 46]
    shutil.rmtree(folder / "step-46")
    assert checkpoint(folder, back, program="", as_json=True) == 0
    for place in (folder, back):
        resumed, said = trained(cluster, units, place, 3, resume=True)
        assert [kind for kind, _ in said] == ["checkpoint"]
        assert resumed.digests == whole.digests
        assert resumed.accuracies == whole.accuracies
    assert steps_in(folder) == [45, 46]  # the folder keeps its format
    assert manifest_steps(RealDisk(back).names()) == [45, 46]


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


OTHERS: dict[str, dict[str, Any]] = {
    "dataset": {"dataset": "idx"},
    "world_size": {"world_size": 3},
    "multiple_of": {"multiple_of": 12},
    "epochs": {"epochs": 3},
    "global_batch_size": {"global_batch_size": 32},
    "learning_rate": {"learning_rate": 0.01},
    "lr_scaling": {"lr_scaling": "linear", "learning_rate": 0.4},
    "optimizer": {"optimizer": "adam"},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.5},
    "seed": {"seed": 7},
    "device": {"device": "cuda"},
    "code": {"code": ("mine",)},
}
"""Each field of a training with another value than the one that was stopped has."""


def test_every_field_is_tried_in_a_training_that_goes_on() -> None:
    assert OTHERS.keys() == {field.name for field in fields(DdpConfig)}
    assert set(FREE) < OTHERS.keys()


@pytest.fixture(scope="module")
def stopped(
    cluster: Cluster,
    units: dict[str, Choice],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, DdpResult]:
    """After the first of two epochs; and the result of both."""
    folder = tmp_path_factory.mktemp("stopped")
    whole, _ = trained(cluster, units, folder)
    forget(folder, 46)
    return folder, whole


@pytest.mark.parametrize("name", OTHERS)
def test_a_flag_has_an_effect_in_a_training_that_goes_on_or_is_refused(
    cluster: Cluster,
    units: dict[str, Choice],
    stopped: tuple[Path, DdpResult],
    tmp_path: Path,
    name: str,
) -> None:
    if name in ("device", "code"):  # what carries the ranks, and whose units they run
        assert name in FREE
        return
    folder, whole = tmp_path / "copy", stopped[1]
    shutil.copytree(stopped[0], folder)
    config = replace(config_of(2), **OTHERS[name])
    order = Checkpointing(folder=str(folder), every=EVERY, resume=True)

    def resumed() -> DdpResult:
        return train(cluster, config, None, units, checkpointing=order)

    if name in FREE and name != "lr_scaling":
        result = resumed()
        assert len(result.epochs) == OTHERS[name].get("epochs", 2)
        assert len(result.digests) == OTHERS[name].get("world_size", 2)
        assert result.digests[:2] != whole.digests
        return
    with pytest.raises(RefusedError) as caught:
        resumed()
    flag = "lr" if name.startswith("l") else name.replace("_", "-")
    before, now = (getattr(c, name) for c in (whole.config, config))
    assert f"--{flag} " in str(caught.value)
    assert name == "lr_scaling" or {str(before), str(now)} <= set(
        str(caught.value).replace(",", "").split()
    )
    assert "\n" not in str(caught.value)


def test_fewer_epochs_than_are_done_are_refused(
    cluster: Cluster, units: dict[str, Choice], tmp_path: Path
) -> None:
    trained(cluster, units, tmp_path)
    order = Checkpointing(folder=str(tmp_path), every=EVERY, resume=True)
    with pytest.raises(RefusedError, match=r"\b2\b.*--epochs 1\b"):
        train(
            cluster, replace(config_of(2), epochs=1), None, units, checkpointing=order
        )


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
    folder = tmp_path / "new"
    folder.mkdir()
    left = folder / "step-1.rank-0.12345678.safetensors.tmp"  # a first save, cut short
    left.touch()
    _, said = trained(cluster, units, folder, resume=True)
    ((kind, text),) = said
    assert not left.exists()
    assert kind == "checkpoint"
    assert f"{folder} " in text
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
        ({"resume": True}, "--resume .*--checkpoint"),
        ({"checkpoint_every": 3}, "--checkpoint-every .*--checkpoint"),
        ({"checkpoint_format": "dcp"}, "--checkpoint-format .*--checkpoint"),
        ({"checkpoint": ".", "checkpoint_format": "pt"}, "--checkpoint-format pt"),
        ({"checkpoint": ".", "checkpoint_every": 0}, "--checkpoint-every 0"),
        ({"checkpoint": "file"}, "--checkpoint .*file"),
        ({"checkpoint": "used"}, "--resume"),
        ({"checkpoint": "dcp"}, "--checkpoint .*dcp"),
        (
            {"checkpoint": "used", "checkpoint_format": "dcp", "resume": True},
            "--checkpoint-format",
        ),
        ({"checkpoint": "lost"}, "--checkpoint .*lost"),
        ({"checkpoint": "lost", "resume": True}, "--checkpoint .*lost"),
    ],
)
def test_flags_that_cannot_be(tmp_path: Path, order: dict[str, Any], says: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "lost").symlink_to(tmp_path / "not mounted")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "step-3.json").write_text("")
    if "checkpoint" in order:
        order = order | {"checkpoint": tmp_path / order["checkpoint"]}
    with pytest.raises(ValueError, match=says):
        ddp(Wishes(), Order(**order))


FLAGS: dict[str, Any] = {
    "n": 3, "epochs": 5, "batch_size": 7, "global_batch_size": 32, "lr": 0.5,
    "lr_scaling": "linear", "optimizer": "adam", "momentum": 0.5, "weight_decay": 0.5,
    "dataset": "mnist", "data_dir": Path("data"), "download": True, "device": "cuda",
    "code": ["mine"], "track": "mlflow", "cost_per_worker_hour": 2.0, "max_cost": 2.0,
    "compare": True,
    "monitor": Path("new"), "also": ["tensorboard"], "log_every_n_steps": 3,
    "profile": True, "hang_after": 5.0, "save": Path("file"),
    "checkpoint": Path("folder"), "checkpoint_every": 3, "checkpoint_format": "dcp",
    "resume": True, "seed": 3, "as_json": True,
}  # fmt: skip
"""Each flag of `distlab ddp` with another value than its default."""

NEEDED: dict[str, dict[str, Any]] = {
    "lr_scaling": {"batch_size": 7},
    "data_dir": {"dataset": "mnist"},
    "download": {"dataset": "mnist"},
    "also": {"monitor": Path("new")},
    "log_every_n_steps": {"monitor": Path("new")},
    "profile": {"monitor": Path("new")},
    "checkpoint_every": {"checkpoint": Path("folder")},
    "checkpoint_format": {"checkpoint": Path("folder")},
    "resume": {"checkpoint": Path("folder")},
}
"""Without which flags a flag would change nothing, and is refused."""


def ordered(monkeypatch: pytest.MonkeyPatch, **flags: Any) -> tuple[Wishes, Order]:
    """What the verb hands over."""
    handed: list[tuple[Wishes, Order]] = []
    monkeypatch.setattr("distlab.cli.ddp.ddp", lambda *both: handed.append(both))
    ddp_verb.ddp(**flags)
    return handed[0]


def refusal(wishes: Wishes, order: Order) -> str:
    """Why it is refused, before anything starts; or nothing."""
    try:
        check(order)
        make_config(wishes, num_gpus=0)
        locate(wishes.dataset, folder=order.data_dir, may_download=order.may_download)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_handed_over_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    assert FLAGS.keys() == signature(ddp_verb.ddp).parameters.keys()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distlab.training.ddp_data.download", lambda *_, **__: None)
    plain = ordered(monkeypatch, **NEEDED.get(name, {}))
    given = ordered(monkeypatch, **NEEDED.get(name, {}), **{name: FLAGS[name]})
    assert given != plain
    wishes, order = given
    if name not in ("device", "lr_scaling") and order == plain[1]:
        assert make_config(wishes, num_gpus=0) != make_config(plain[0], num_gpus=0)
    if name in NEEDED:
        alone = refusal(*ordered(monkeypatch, **{name: FLAGS[name]}))
        assert f"--{name.replace('_', '-')}" in alone
