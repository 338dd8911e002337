"""Programs for `distlab.launch`, and whether their processes have ended."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

HEAD = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
here = pathlib.Path(__file__).parent
def say_pid():
    (here / f"{rank}.part").write_text(str(os.getpid()))
    (here / f"{rank}.part").rename(here / f"{rank}.pid")
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them")


def script(folder: Path, program: str) -> Path:
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(program))
    return path


LAST_WORDS = "about to die"
START = "--- start {} of this rank ---"  # between two starts, in the log

DIES = """
print(f"start {generation}")
say_pid()
if rank == 2 and generation <= int(sys.argv[1]):
    for other in (0, 1, 3):
        wait_for(f"{other}.pid")
    print("about to die")
    os.kill(os.getpid(), signal.SIGKILL)
if generation <= int(sys.argv[1]):
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def ended(pid: int) -> bool:
    """Whether it ends; who was killed may take a moment."""
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_alive(pid)


# ── agents of several nodes, see the fixture of this name ───────────────────────────

Agent = subprocess.Popen[str]


def free_port() -> int:
    """Return a port that is still free when the agent binds it.

    One that the kernel picks may become the source port of any other connection before
    then, so this one lies below the range from which the kernel picks.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def outputs(agents: Sequence[Agent]) -> list[str]:
    return [agent.communicate(timeout=300)[0] for agent in agents]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until, f"there is no {path.name}"
        time.sleep(0.02)


def log(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank_{rank}.log").read_text().splitlines()


def torchrun(folder: Path, num_ranks: int) -> list[str]:
    """The command without the program; it leaves nothing outside `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={num_ranks}", f"--log-dir={folder}"]
