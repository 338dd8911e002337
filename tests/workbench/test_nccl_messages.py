"""What is handed to NCCL, and when; with a group that writes down what it is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from distlab.comm import CommRefusedError
from distlab.comm._nccl import NcclMessages

LIMIT = timedelta(seconds=1)


class Told:
    """Stands for ProcessGroupNCCL, and for the work that a launch gives."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Told:
        self.calls.append("end")
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer))

    def wait(self, timeout: timedelta) -> None:
        self.calls.append("wait")


def test_what_may_wait_for_each_other_is_launched_together() -> None:
    group = Told()
    messages, tensor = NcclMessages(group), torch.zeros(1)
    sent = messages.note("send", tensor, 1, 0)
    received = messages.note("recv", tensor, 2, 0)
    assert group.calls == []
    assert not sent.is_completed()
    received.wait(LIMIT)
    assert group.calls == ["start", ("send", 1), ("recv", 2), "end", "wait"]
    sent.wait(LIMIT)
    assert group.calls[5:] == ["wait"]  # launched it was before


def test_a_launch_of_nothing_tells_nothing() -> None:
    group = Told()
    NcclMessages(group).launch()
    assert group.calls == []


def test_a_tag_is_refused() -> None:
    with pytest.raises(CommRefusedError, match="no tags"):
        NcclMessages(Told()).note("recv", torch.zeros(1), 0, 7)
