"""`distlab.distributed.elastic` and a disk that takes no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distlab.distributed as dist
from distlab.comm import DiskError, RealDisk
from distlab.distributed.copies import decode_own, encode_own
from distlab.distributed.parts import unit
from distlab.sim.observed_disk import ObservedDisk

FULL = DiskError("the disk is full")


class FullDisk(ObservedDisk):
    """Has no room for the files of step 2."""

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        if name == "write" and "step-2." in str(arguments[0]):
            raise FULL


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group(world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_a_full_disk_costs_a_checkpoint_and_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    training = dist.elastic(state, folder=tmp_path, save_every=1)
    training._disk = FullDisk(RealDisk(tmp_path))  # type: ignore[assignment]
    saved = []
    for step in training.steps(3):
        with step:
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        found = unit("fault_tolerance").load(RealDisk(tmp_path))
        saved.append(found.step)
    assert training.completed == 3
    assert saved == [1, 1, 3]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"\bstep 2\b", said)
    assert str(FULL) in said


class Counting(torch.nn.Linear):
    """Keeps a number that is neither a parameter nor a buffer."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@pytest.mark.usefixtures("_alone")
def test_extra_state_is_copied_in_memory_as_a_ranks_own() -> None:
    model = Counting(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = dist.elastic({"model": model, "optimizer": optimizer})
    model.calls = 5
    shared, own = training._state()
    other = own | {"apart": {"extra_state": {"": 7}}}
    for owns, calls in (([own], 5), ([other], 7), ([other, own], 7)):
        model.calls = 0
        training._restore(shared, [decode_own(encode_own(one)) for one in owns])
        assert model.calls == calls
