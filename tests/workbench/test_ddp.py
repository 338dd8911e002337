"""`distlab ddp`: what it is asked for, what the ranks do, what it says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.ddp_report import CONCEPTS, plan
from distlab.curriculum import find_root
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.data.idx import IdxError
from distlab.models.convnet import make_convnet
from distlab.runner import Cluster, RunnerError
from distlab.training.ddp import DdpResult, Moment, Shard, compare, train, train_alone
from distlab.training.ddp_code import choose_units
from distlab.training.ddp_config import PRESETS, DdpConfig, Wishes, make_config
from distlab.training.ddp_data import locate, make_optimizer, read_split
from distlab.training.ddp_estimate import estimate, probe
from tests.workbench.images import NUM_TRAIN, write_set

ROOT = find_root(Path(__file__))
TRAINER = ROOT / "solutions" / "phase1_data_parallel" / "trainer.py"
REFERENCE = ("reference",)


def config_of(**wishes: Any) -> DdpConfig:
    return make_config(Wishes(**{"epochs": 1, **wishes}), num_gpus=0)


def changed(folder: Path, old: str, new: str) -> str:
    text = TRAINER.read_text(encoding="utf-8")
    assert old in text
    path = folder / "my_trainer.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


# ── what is asked for ───────────────────────────────────────────────────────────────


def test_defaults_and_batches() -> None:
    config = config_of()
    assert (config.global_batch_size, config.samples_per_rank) == (64, 32)
    assert (config.device, config.backend) == ("cpu", "gloo")
    config = config_of(world_size=3, batch_size=20)
    assert (config.global_batch_size, config.samples_per_rank) == (60, 20)
    config = config_of(world_size=3)  # 64 = 3 · 21 + 1, and equal shares are needed
    assert (config.samples_per_rank, config.step_size) == (21, 63)
    alone = replace(config, world_size=1)
    assert (alone.samples_per_rank, alone.equal_size(29)) == (63, 27)


@pytest.mark.parametrize(
    ("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)]
)
def test_learning_rate_scaling(scaling: str, factor: float) -> None:
    config = config_of(
        world_size=4, batch_size=8, learning_rate=0.1, lr_scaling=scaling
    )
    assert config.learning_rate == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers(name: str) -> None:
    config = config_of(dataset="mnist", optimizer=name, weight_decay=0.01)
    optimizer = make_optimizer(config, make_convnet())
    assert type(optimizer).__name__.lower() == name
    assert optimizer.defaults["weight_decay"] == 0.01
    usual = PRESETS["mnist"].learning_rate if name == "sgd" else 1e-3
    assert optimizer.defaults["lr"] == usual
    if name == "sgd":
        assert optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"batch_size": 8, "global_batch_size": 16}, "give one of them"),
        ({"global_batch_size": 3, "world_size": 4}, "not one for each of 4 ranks"),
        ({"batch_size": 0}, "--batch-size 0: choose at least 1"),
        ({"epochs": 0}, "0 epochs: choose at least 1"),
        ({"world_size": 0}, "0 ranks: choose between 1 and 64"),
        ({"world_size": 65}, "65 ranks: choose between 1 and 64"),
        ({"dataset": "imagenet"}, "choose digits, mnist, fashion-mnist or idx"),
        ({"optimizer": "lamb"}, "--optimizer lamb: choose sgd, adam or adamw"),
        ({"lr_scaling": "cubic"}, "choose none, linear or sqrt"),
        ({"lr_scaling": "linear"}, "give --batch-size, which is that of one rank"),
        ({"learning_rate": 0.0}, "--lr 0: choose a number above 0"),
        ({"learning_rate": math.nan}, "--lr nan"),
        ({"learning_rate": math.inf}, "--lr inf"),
        ({"momentum": 1.0}, "--momentum 1: choose a number at least 0 and below 1"),
        ({"momentum": 0.9, "optimizer": "adam"}, "adam has no --momentum"),
        ({"weight_decay": -1.0}, "--weight-decay -1"),
        ({"seed": -1}, "--seed -1"),
        ({"device": "tpu"}, "choose auto, cpu or cuda"),
        ({"device": "cuda"}, "torch sees no GPU here"),
    ],
)
def test_what_cannot_be_is_one_sentence(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        config_of(**wishes)
    assert "\n" not in str(caught.value)


def test_gpus_are_one_for_each_rank() -> None:
    two = Wishes(device="auto", world_size=2)
    assert make_config(two, num_gpus=2).backend == "nccl"
    assert make_config(two, num_gpus=1).device == "cpu"
    with pytest.raises(ValueError, match=r"\b2 GPUs\b.* 1;"):
        make_config(replace(two, device="cuda"), num_gpus=1)


# ── where the data is ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dataset", "wishes", "sentence"),
    [
        ("digits", {"folder": Path()}, "--data-dir: the digits come with"),
        ("digits", {"may_download": True}, "--download: the digits come with"),
        ("idx", {}, "give --data-dir"),
        ("idx", {"may_download": True}, "nowhere to be had"),
        ("mnist", {}, r"MNIST is not in .*mnist: get it with --download, or"),
        ("mnist", {"folder": Path("no", "where")}, "no/where is not there"),
    ],
)
def test_data_that_is_not_there(
    dataset: str,
    wishes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTLAB_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=sentence):
        locate(dataset, **wishes)


def test_ones_own_files_are_not_taken_for_mnist(tmp_path: Path) -> None:
    folder = write_set(tmp_path)
    own, claimed = locate("idx", folder=folder), locate("mnist", folder=folder)
    assert own.note
    assert own.note != claimed.note
    assert len(read_split(own.files, own.known).train_targets) == NUM_TRAIN
    with pytest.raises(IdxError, match="SHA-256"):
        read_split(claimed.files, claimed.known)


# ── the training ────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> DdpResult:
    return train_alone(cluster, config_of(), None, choose_units(REFERENCE))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_do_the_training_of_one_process(
    cluster: Cluster, world_size: int
) -> None:
    config = config_of(world_size=world_size)
    alone = train_alone(cluster, config, None, choose_units(REFERENCE))
    shards: list[tuple[list[Shard], int]] = []
    moments: list[Moment] = []
    losses: list[tuple[int, float]] = []
    logged: list[tuple[int, str]] = []
    result = train(
        cluster,
        config,
        None,
        choose_units(REFERENCE),
        on_shards=lambda found, steps: shards.append((found, steps)),
        on_moment=moments.append,
        on_epoch=lambda epoch, loss: losses.append((epoch, loss)),
        on_log=lambda rank, line: logged.append((rank, line)),
    )
    beside = compare(result, alone)
    assert result.failures() == beside.failures() == []
    assert len(set(result.digests)) == 1
    assert len(result.digests) == world_size
    assert beside.difference <= 1e-12  # the digits are float64
    assert result.accuracies == (alone.accuracy,) * world_size
    assert result.num_steps == 23
    (row,), (row_alone,) = result.epochs, alone.epochs
    assert row.train_loss == pytest.approx(row_alone.train_loss, abs=1e-12)
    assert row.loss == pytest.approx(row_alone.loss, abs=1e-12)
    # 23 steps; an all_reduce of 4,810 gradients and of a loss, as a ring sends them
    ring_bytes = 2 * (world_size - 1) / world_size * (4810 + 1) * 8
    assert result.step_bytes == pytest.approx(ring_bytes)
    assert 0 < result.communication < 1
    assert 0 < result.data_wait < 1
    assert result.cost(3600.0) == pytest.approx(world_size * result.seconds)

    ((found, steps),) = shards
    assert steps == 23
    assert tuple(found) == result.shards
    # 22 batches of 64 samples and one of 29: what does not divide is left out
    counts = [22 * (64 // world_size) + 29 // world_size] * world_size
    assert [shard.count for shard in found] == counts
    assert result.losses == (result.losses[0],) * world_size
    assert result.losses[0] == (pytest.approx(row.train_loss, abs=1e-12),)
    assert len({place for shard in found for place in shard.first}) == 5 * world_size
    assert {moment.rank for moment in moments} == set(range(world_size))
    assert losses == [(0, pytest.approx(row.train_loss))]
    ((rank, line),) = logged
    assert rank == 0
    assert line.startswith("epoch 1 ")


def test_images_are_learnt_by_ranks(cluster: Cluster, tmp_path: Path) -> None:
    files = locate("idx", folder=write_set(tmp_path, packed=True)).files
    config = config_of(dataset="idx", epochs=3, global_batch_size=8)
    units = choose_units(REFERENCE)
    result = train(cluster, config, files, units)
    assert result.failures() == []
    assert result.weights[0].dtype == torch.float32
    assert result.accuracy > 0.9  # ten places are easy to tell apart
    assert [row.accuracy for row in result.epochs][-1] == result.accuracy
    beside = compare(result, train_alone(cluster, config, files, units))
    assert beside.failures() == []
    assert beside.first_difference < 1e-6


def test_a_batch_that_is_too_small_for_all_ranks_is_left_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    files = locate("idx", folder=write_set(tmp_path)).files
    config = config_of(dataset="idx", world_size=4, global_batch_size=5)
    result = train(cluster, config, files, choose_units(REFERENCE))
    assert NUM_TRAIN == 19 * 5 + 1
    assert result.failures() == []
    assert [shard.count for shard in result.shards] == [19] * 4
    assert result.num_steps == 19


def test_adam_is_not_judged_by_its_first_step(
    cluster: Cluster, alone: DdpResult
) -> None:
    config = config_of(optimizer="adam")
    result = train(cluster, config, None, choose_units(REFERENCE))
    assert compare(result, alone).tolerance is None
    assert compare(result, alone).first_difference > 1e-3  # adam beside sgd
    assert compare(result, alone).failures() == []


def test_sums_are_seen_after_the_first_step(
    cluster: Cluster, alone: DdpResult, tmp_path: Path
) -> None:
    summed = changed(tmp_path, "parameter.grad /= comm.world_size", "pass")
    result = train(cluster, config_of(), None, choose_units((summed,)))
    assert result.failures() == []  # equal on all ranks, and wrong on all
    assert compare(result, alone).first_difference > 1e-3
    assert len(compare(result, alone).failures()) == 1


def test_without_messages_replicas_and_metrics_differ(
    cluster: Cluster, tmp_path: Path
) -> None:
    own = changed(tmp_path, "    average_gradients(comm, model)\n", "")
    result = train(cluster, config_of(), None, choose_units((own,)))
    (sentence,) = result.failures()
    assert sentence.startswith("REPLICAS DIFFER: ")
    assert result.step_bytes == 8  # the loss
    lonely = changed(tmp_path, "comm.all_reduce(sums)", "pass")
    result = train(cluster, config_of(), None, choose_units((lonely,)))
    (sentence,) = result.failures()
    assert sentence.startswith("METRICS DIFFER: ")
    unequal = changed(tmp_path, "    comm.all_reduce(mean_loss)\n", "")
    result = train(cluster, config_of(), None, choose_units((unequal,)))
    (sentence,) = result.failures()
    assert sentence.startswith("LOSSES DIFFER: ")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "    return history\n",
            "    if comm.rank == 0:\n        comm.barrier()\n    return history\n",
            "rank 0 waits in barrier, but rank 1 has already finished",
        ),
        ("    return history\n", "    return None\n", "fit returned a NoneType; expec"),
        ("    return history\n", "    return []\n", "fit returned a list of 0; expect"),
        ("model.train()", "raise RuntimeError('mine')", "RuntimeError at .*: mine"),
    ],
)
def test_code_that_does_not_end_well_is_explained(
    cluster: Cluster, tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    units = choose_units((changed(tmp_path, old, new),))
    with pytest.raises(RunnerError, match=sentence):
        train(cluster, config_of(), None, units)


def test_the_estimate_counts_steps() -> None:
    config = config_of(epochs=4, world_size=2)
    found = estimate(config, read_split(None))
    assert found.num_steps == 4 * 23
    assert found.seconds > found.num_steps * found.step_s > 0
    assert found.cost(3600.0) == pytest.approx(2 * found.seconds)
    assert "at least" in "".join(plan(config, "", found, 1.0))


def test_the_estimate_counts_start_and_messages(cluster: Cluster) -> None:
    config = config_of(epochs=4, world_size=2)
    probed = probe(cluster, config)
    assert probed.messages_s > 0
    assert probed.start_s > 0
    found = estimate(config, read_split(None), probed)
    least = probed.start_s + found.num_steps * (found.step_s + probed.messages_s)
    assert found.seconds == pytest.approx(least) or found.seconds > least
    note = "60,000 images of 28×28 pixels, 10,000 held out; plain, as they came"
    lines = plan(replace(config, dataset="fashion-mnist"), note, found, 1.0)
    assert "about" in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_every_concept_can_be_explained() -> None:
    assert {slug for _, slug in CONCEPTS} <= set(read_misconceptions())


def test_convnet() -> None:
    before = torch.random.get_rng_state()
    model = make_convnet(seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert sum(parameter.numel() for parameter in model.parameters()) == 80_202
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    same, other = make_convnet(seed=3), make_convnet(seed=4)
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert not torch.equal(model[0].weight, other[0].weight)
