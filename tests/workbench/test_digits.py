"""Several ranks are one training, and what is not one training is found out."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distlab.cli.demo import demo
from distlab.cli.screen import command
from distlab.curriculum import find_root
from distlab.data.digits import load_digits_split
from distlab.data.text import load_text
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, RunnerError
from distlab.training.digits import (
    PRELOADS,
    DigitsConfig,
    DigitsResult,
    Moment,
    Proof,
    Shard,
    compare,
    train_alone,
    train_on_ranks,
)
from tests.workbench.golden import Golden
from tests.workbench.refusals import without_figures

SHORT = DigitsConfig(epochs=2)
FLOOR = 0.7  # what two epochs reach
SOLUTION = find_root() / "solutions" / "phase1_data_parallel" / "trainer.py"


@pytest.fixture(scope="module")
def alone() -> DigitsResult:
    return train_alone(SHORT)


def test_digits_are_the_real_ones() -> None:
    data = load_digits_split()
    assert data.train_inputs.shape == (1437, 64)
    assert data.held_out_inputs.shape == (360, 64)
    assert data.train_inputs.dtype == torch.float64
    both = torch.cat([data.train_inputs, data.held_out_inputs])
    assert (both.min(), both.max()) == (0.0, 1.0)
    assert len(both.unique(dim=0)) == 1797
    targets = torch.cat([data.train_targets, data.held_out_targets])
    assert targets.bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


OF_SCIKIT_LEARN = "81578d12c5c4a31487d6c36da996111367d6d79a58b8da7abc29d9be52c3d309"
"""SHA-256 of the split with seed 0, made from `sklearn.datasets.load_digits`."""


def test_digits_are_those_of_scikit_learn() -> None:
    found = hashlib.sha256()
    for tensor in vars(load_digits_split()).values():
        found.update(tensor.numpy().tobytes())
    assert found.hexdigest() == OF_SCIKIT_LEARN


def test_the_trainer_finds_them_without_importing_distlab() -> None:
    code = (
        "import sys, trainer; found = map(len, trainer._digits()); "
        "print(*found, 'distlab' in sys.modules)"
    )
    paths = os.pathsep.join([str(SOLUTION.parent), str(find_root())])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1797", "1797", "False"]


def test_the_split_depends_on_the_seed_alone() -> None:
    first, before = load_digits_split(0), load_digits_split(0).train_inputs
    first.train_inputs.add_(1)  # a caller's own, not everybody's
    assert torch.equal(before, load_digits_split(0).train_inputs)
    text = load_text()
    text.tokens.zero_()
    assert load_text().tokens.count_nonzero()
    assert not torch.equal(before, load_digits_split(1).train_inputs)


def test_mlp() -> None:
    before = torch.random.get_rng_state()
    model = make_mlp(seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert sum(p.numel() for p in model.parameters()) == 4810
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    same, other = make_mlp(seed=3), make_mlp(seed=4)
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert not torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_do_the_training_of_one_process(
    cluster: Cluster, alone: DigitsResult, world_size: int
) -> None:
    config = replace(SHORT, world_size=world_size)
    result = train_on_ranks(cluster, config)
    proof = compare(result, alone, accuracy_floor=FLOOR)
    assert proof.failures() == []
    assert proof.holds
    assert proof.difference <= 1e-10
    assert len(result.digests) == world_size
    assert result.losses == pytest.approx(alone.losses, abs=1e-12)
    assert set(result.accuracies) == {alone.accuracy}
    # 44 steps; five all_reduces of 4,810 gradients and a loss, as a ring sends them
    ring_bytes = 2 * (world_size - 1) / world_size * (4810 + 1) * 8
    assert result.step_bytes == pytest.approx(ring_bytes)
    assert 0 < result.communication < 1


def test_without_averaging_the_replicas_differ(cluster: Cluster) -> None:
    whole = DigitsConfig(mode="alone")  # it is quick: nobody waits for anybody
    result = train_on_ranks(cluster, whole)
    proof = compare(result, train_alone(whole), accuracy_floor=0.9)
    assert min(result.accuracies) > 0.9  # accuracy does not see it
    assert len(set(proof.digests)) == 4
    assert proof.difference > proof.tolerance
    assert len(proof.failures()) == 2
    assert not proof.holds
    assert (result.step_bytes, result.communication) == (0, 0)


def test_sums_give_one_model_and_the_wrong_one(
    cluster: Cluster, alone: DigitsResult
) -> None:
    result = train_on_ranks(cluster, replace(SHORT, mode="summed"))
    proof = compare(result, alone, accuracy_floor=FLOOR)
    assert result.accuracy > alone.accuracy  # accuracy even likes it
    assert len(set(result.digests)) == 1  # so do the digests
    assert proof.difference > proof.tolerance
    assert len(proof.failures()) == 1


def test_progress_and_shards_are_told(cluster: Cluster) -> None:
    shards: list[list[Shard]] = []
    moments: list[Moment] = []
    config = replace(SHORT, world_size=2)
    result = train_on_ranks(
        cluster, config, on_shards=shards.append, on_moment=moments.append
    )
    assert [*map(tuple, shards)] == [result.shards]
    assert [shard.first for shard in result.shards] == [(0, 2, 4), (1, 3, 5)]
    assert [shard.count for shard in result.shards] == [704, 704]
    assert len({shard.pid for shard in result.shards}) == 2
    assert {moment.epoch for moment in moments} == {0, 1}
    assert moments[0].accuracy is None
    assert moments[-1].accuracy is not None


def test_a_trainer_of_ones_own_is_judged(
    cluster: Cluster, alone: DigitsResult, tmp_path: Path
) -> None:
    late = _changed(
        tmp_path, "average_gradients(comm, model)\n    optimizer", "optimizer"
    )
    result = train_on_ranks(cluster, replace(SHORT, world_size=2, code=late))
    assert len(set(compare(result, alone).digests)) == 2
    unequal = _changed(tmp_path, "comm.broadcast(tensor.detach(), src)", "pass")
    result = train_on_ranks(cluster, replace(SHORT, world_size=2, code=unequal))
    assert len(set(compare(result, alone).digests)) == 2
    broken = _changed(tmp_path, "loss.backward()", "raise RuntimeError('mine')")
    with pytest.raises(RunnerError, match="mine"):
        train_on_ranks(cluster, replace(SHORT, world_size=2, code=broken))


def _changed(folder: Path, old: str, new: str) -> str:
    text = SOLUTION.read_text()
    assert text.count(old) == 1
    path = folder / "trainer.py"
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_proof_names_each_thing_that_is_wrong(golden: Golden) -> None:
    good = Proof(difference=1e-15, digests=("a", "a"), accuracy=0.96)
    assert good.holds
    nan = float("nan")
    bad = Proof(difference=nan, digests=("a", "b"), accuracy=nan)
    assert len(bad.failures()) == 3
    wrong = Proof(difference=1e-3, digests=("a", "b", "a"), accuracy=0.5)
    golden("demo/proof", "\n".join(wrong.failures()))


@pytest.mark.parametrize("different", [{"epochs": 0}, {"world_size": 3}])
def test_impossible_configurations(different: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\bepochs\b|\b3\b"):
        DigitsConfig(**different)  # type: ignore[arg-type]


def test_the_preloads_start_no_thread() -> None:
    imports = "; ".join(f"import {name}" for name in PRELOADS)
    code = f"{imports}; from distlab.runner.zygote import num_threads as n; print(n())"
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(find_root()), **one},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"


@pytest.mark.slow
def test_demo_in_plain_lines(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert demo(world_size=2, epochs=1) == 0
    said = capsys.readouterr().out
    assert not set(said) & {"\r", "\x1b"}
    golden("demo/phase1", without_figures(said.replace(command(""), "distlab")))


def test_demo_as_json_and_not_the_same(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lent = nullcontext(cluster)  # the demo above starts one of its own
    monkeypatch.setattr("distlab.runner.Cluster", lambda **_: lent)
    late = _changed(
        tmp_path, "average_gradients(comm, model)\n    optimizer", "optimizer"
    )
    assert demo(world_size=2, epochs=1, as_json=True, code=late) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], found["exit"]) == (False, 1)
    assert len(set(found["digests"])) == 2
    assert len(set(found["pids"])) == 2


@pytest.mark.parametrize("world_size", [0, 65])
def test_demo_refuses_numbers_of_ranks(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^{world_size} ranks\b.*\b64\b"):
        demo(world_size=world_size)
