"""GPUs are hidden from what forks ranks, and shown to the ranks that ask for them."""

from __future__ import annotations

import os

import pytest
import torch

from distlab.grading import warmup
from distlab.runner import Cluster, RankContext
from distlab.runner.gpus import show_gpus, without_gpus


@pytest.mark.parametrize("before", [{}, {"CUDA_VISIBLE_DEVICES": "1,3"}])
def test_what_is_hidden_can_be_shown_again(before: dict[str, str]) -> None:
    hidden = without_gpus({**before, "HOME": "/"})
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""
    show_gpus(hidden)
    hidden.pop("PYTORCH_NVML_BASED_CUDA_CHECK")
    assert hidden == {**before, "HOME": "/"}


def seen(context: RankContext) -> list[str | None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    show_gpus()
    return [before, os.environ.get("CUDA_VISIBLE_DEVICES")]


def test_a_rank_sees_none_until_it_is_shown_what_the_shell_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with Cluster() as cluster:
        values = cluster.run(seen, 2).require_finished().values
    assert values == [["", "2"], ["", "2"]]


@pytest.mark.parametrize(
    ("built", "here", "steps"), [(False, True, 1), (True, False, 1), (True, True, 0)]
)
def test_nothing_is_rehearsed_where_that_would_wake_a_gpu(
    monkeypatch: pytest.MonkeyPatch, built: bool, here: bool, steps: int
) -> None:
    taken = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(warmup, "has_nvidia_gpu", lambda: here)
    monkeypatch.setattr(torch, "manual_seed", taken.append)
    warmup.one_step()
    assert len(taken) == steps
