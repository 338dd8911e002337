"""Checkpoints that an FSDP2 script loads on another number of ranks, and the way back.

Its losses have to be those of our own continuation: in float64, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.checkpoint import checkpoint
from distlab.runner import Cluster
from tests.workbench.dcp_trainings import PER_EPOCH, fsdp2, of_library, on_engine
from tests.workbench.distributed_ranks import ranks

pytestmark = pytest.mark.slow
OWN = pytest.mark.own  # `make test-dcp`: half a minute each, and little that is new


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def expect_close(losses: Any, others: Any) -> None:
    found = torch.tensor(losses, dtype=torch.double)
    expected = torch.tensor(others, dtype=torch.double)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("adamw", {"backend": "pytorch-ddp", "zero_stage": 1}, id="zero"),
        pytest.param("momentum", {"backend": "scratch"}, id="scratch", marks=OWN),
        pytest.param("sgd", {"backend": "fsdp2"}, id="fsdp2", marks=OWN),
    ],
)
def test_an_engine_and_a_script_of_fsdp2_continue_each_other(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    on_engine(3, kind, 2, checkpoint_dir=ours, checkpoint_format="dcp", **config)
    said = fsdp2(
        4, "--optimizer", kind, "--load", ours / "epoch_0002", "--save", theirs
    )
    own = on_engine(2, kind, 4, resume_from_checkpoint=ours / "epoch_0002", **config)
    expect_close(said["losses"], own.losses[2 * PER_EPOCH :])
    assert (said["step"], said["epoch"]) == (4 * PER_EPOCH, 4)
    back = on_engine(3, kind, 6, resume_from_checkpoint=theirs, **config)
    on = fsdp2(2, "--optimizer", kind, "--load", theirs)
    assert len(back.epochs) == 6
    expect_close(on["losses"], back.losses[4 * PER_EPOCH :])


@pytest.mark.parametrize(
    ("kind", "stage", "writes"),
    [
        pytest.param("adamw", 1, "dcp", marks=OWN),
        ("momentum", 2, "shards"),
        pytest.param("adamw", 0, "dcp", marks=OWN),
    ],
)
def test_the_library_and_a_script_of_fsdp2_continue_each_other(
    kind: str, stage: int, writes: str, cluster: Cluster, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def train(n: int, load: Path | str, save: Path | str, stage: int = stage) -> Any:
        wanted = kind, stage, 4, str(load), str(save), writes
        return ranks(cluster, of_library, n, *wanted)[0]

    train(3, "", ours)
    given = ours / "step-4"
    if writes == "shards":
        given = tmp_path / "converted"
        assert checkpoint(ours, given, program="", as_json=True) == 0
    said = fsdp2(4, "--optimizer", kind, "--load", given, "--save", theirs)
    own, step = train(2, ours, "")
    assert step == said["step"] == 8
    expect_close(said["losses"], own)
    for other in (stage, 0 if stage else 1):  # also behind the other kind of optimizer
        back, step = train(3, theirs, "", other)
        assert step == 12
        on = fsdp2(2, "--optimizer", kind, "--load", theirs)
        expect_close(on["losses"], back)
