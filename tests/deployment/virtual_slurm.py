"""A SLURM of two nodes on this machine: slurmctld and two slurmd, as root.

What it needs, on Debian: apt install slurm-wlm munge. All of its files lie in one
folder, and all of its processes end with the context.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
PATIENCE_S = 60.0
CONFIG = """
ClusterName=distlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobRequeue=1
KillWait=5
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What keeps this machine from it; "": nothing."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root here"


class VirtualSlurm:
    """Its commands; nodes n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """The output of sbatch, squeue, scontrol and so on."""
        done = subprocess.run(
            command,
            env=self._env | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED and so on."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait(self, job: str, *states: str, seconds: float = 120.0) -> None:
        """Return when the job has one of these states."""
        until = time.monotonic() + seconds
        while (now := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {now}, not {states}"
            time.sleep(0.2)


@contextlib.contextmanager
def virtual_slurm(folder: Path) -> Iterator[VirtualSlurm]:
    (folder / "state").mkdir(parents=True)
    ports = free_ports(3)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(),
            folder=folder,
            port=ports[0],
            port1=ports[1],
            port2=ports[2],
        )
    )
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    files = [f"--{name}={folder}/munge.{end}" for name, end in MUNGE_FILES.items()]
    with contextlib.ExitStack() as daemons:
        for command in [
            ["munged", "--foreground", "--force", *files],
            ["slurmctld", "-D", "-f", str(config)],
            ["slurmd", "-D", "-N", "n1", "-f", str(config)],
            ["slurmd", "-D", "-N", "n2", "-f", str(config)],
        ]:
            daemons.enter_context(daemon(command, folder))
        slurm = VirtualSlurm(folder)
        until = time.monotonic() + PATIENCE_S
        while not both_idle(slurm):
            assert time.monotonic() < until, "the two nodes never became idle"
            time.sleep(0.2)
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root", "--signal=KILL", "--full")
            slurm.run("scancel", "--user=root")


MUNGE_FILES = {
    "key-file": "key",
    "socket": "sock",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def both_idle(slurm: VirtualSlurm) -> bool:
    with contextlib.suppress(AssertionError):
        return slurm.run("sinfo", "--noheader", "--format=%D %t") == "2 idle"
    return False


@contextlib.contextmanager
def daemon(command: list[str], folder: Path) -> Iterator[None]:
    """A process of a session of its own, which ends with the context."""
    name = f"{command[0]}-{command[3] if command[0] == 'slurmd' else ''}"
    with (folder / f"{name}.log").open("w") as log:
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
