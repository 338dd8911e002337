"""The shipped compose file: two containers train, one is killed, both go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.virtual_docker import (
    NoEngineError,
    VirtualDocker,
    missing,
    virtual_docker,
)

EXAMPLE = "distlab/distributed/example.py"
EPOCHS = "150"


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[VirtualDocker]:
    if missing():
        pytest.skip(missing())
    try:
        with virtual_docker(tmp_path) as found:
            yield found
    except NoEngineError as error:
        pytest.skip(f"dockerd does not start here: {error}")


@pytest.mark.parametrize(("killed", "restarts"), [("node0", [1, 1]), ("node1", [1, 0])])
def test_a_killed_container_comes_back_and_training_goes_on(
    docker: VirtualDocker, tmp_path: Path, killed: str, restarts: list[int]
) -> None:
    docker.up(TRAIN=EXAMPLE, EPOCHS=EPOCHS)
    victim = docker.main_process(killed)
    until = time.monotonic() + 120
    while "epoch 3 " not in docker.logs():
        assert time.monotonic() < until, docker.logs()[-3000:]
        time.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    docker.wait(seconds=240)
    logs = docker.logs()
    # The agent of node 1 ends with node 0's; node 0's waits for another agent.
    assert docker.restarts() == restarts
    assert logs.count("epoch 1 ") == 1  # nobody began again
    assert logs.count(f"epoch {EPOCHS} ") == 1
    assert ending(logs) == ending(unbroken(tmp_path))


def ending(logs: str) -> str:
    """What rank 0 says last: accuracy, and a digest of the weights."""
    return re.findall(r"accuracy .* the same weights on 2 ranks: \w{8}", logs)[0]


def unbroken(folder: Path) -> str:
    launch = [sys.executable, "-m", "distlab.launch", "--nproc-per-node=2"]
    command = [*launch, f"--log-dir={folder}", EXAMPLE, f"--epochs={EPOCHS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
