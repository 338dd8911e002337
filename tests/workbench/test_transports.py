"""A transport of another package: the launcher, the ranks and the runner use it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.transports import find_transport, transport_names
from tests.workbench.other_package import install_package, run_beside

COURIER = """
from distlab.comm import TcpComm
from distlab.transports import register_transport

def open_courier(meeting):
    print("by courier", flush=True)
    store, secret = meeting.own_store()
    return TcpComm.from_store(
        store, meeting.rank, meeting.world_size, secret=secret
    )

register_transport("courier", open_courier, title="a courier")
"""
POINTS = """
[distlab.transports]
courier = other_transports.courier
broken = other_transports.missing
"""
SCRIPT = """
import torch
import distlab.distributed as dist

dist.init_process_group()
total = dist.all_reduce(torch.tensor([1.0 + dist.get_rank()]))
info = dist.get_distributed_info()
print(info["backend"], info["transport"], total.item())
dist.destroy_process_group()
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder in which a package with a transport is installed, as pip would do it."""
    install_package(tmp_path, "other_transports", POINTS, courier=COURIER)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def launched(folder: Path, backend: str) -> subprocess.CompletedProcess[str]:
    ranks = ("--nproc-per-node", "2", "--backend", backend)
    return run_beside(folder, "-m", "distlab.launch", *ranks, "script.py")


def test_another_packages_transport_carries_a_job(other: Path) -> None:
    done = launched(other, "courier")
    assert done.returncode == 0, done.stderr
    for line in ("by courier", "courier a courier 3.0"):
        assert done.stdout.count(line) == 2


def test_a_transport_that_cannot_be_imported_is_refused(other: Path) -> None:
    done = launched(other, "broken")
    assert done.returncode == 2
    assert "other_transports.missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_transport_says_of_itself_decides() -> None:
    assert transport_names() == ("gloo", "nccl", "tcp")
    assert transport_names(lambda one: one.needs_gpu) == ("nccl",)
    for name in transport_names():
        if find_transport(name).regroups:
            LaunchConfig(backend=name, standby=1)
        else:
            with pytest.raises(LaunchError, match=name):
                LaunchConfig(backend=name, standby=1)
