"""A Docker engine of its own, with an image that needs no registry.

The image is empty: each container gets this machine's system folders, the environment
and the checkout as read-only binds. What it needs, on Debian, as root: apt install
docker.io docker-compose.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "solutions/phase4_production/deployment/docker-compose.yaml"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/opt")  # /sbin has docker-init
DAEMON, CLIENT = "/usr/sbin/dockerd", "/usr/bin/docker"
PATH = f"{sys.prefix}/bin:/usr/bin:/bin"
PATIENCE_S = 120.0


def missing() -> str:
    """What keeps this machine from it; "": nothing."""
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    if not (Path(DAEMON).exists() and shutil.which("docker-compose")):
        return "no dockerd or docker-compose: apt install docker.io docker-compose"
    return ""


class NoEngineError(RuntimeError):
    """dockerd ends at once: too few rights, or a kernel without what it needs."""


class VirtualDocker:
    """Its commands; `up` starts the services of the shipped compose file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/sock",
            "COMPOSE_PROJECT_NAME": "distlab",
            "IMAGE": "distlab-empty",
        }

    def docker(self, *command: str, given: bytes = b"") -> str:
        return self._run([CLIENT, *command], given)

    def compose(self, *command: str, **variables: str) -> str:
        files = ["-f", str(COMPOSE), "-f", str(self.folder / "binds.yaml")]
        return self._run(["docker-compose", *files, *command], **variables)

    def _run(self, command: list[str], given: bytes = b"", **variables: str) -> str:
        done = subprocess.run(
            command,
            input=given,
            env=self._env | variables,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        output = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == 0, f"{command}: {output}"
        return output

    def up(self, **variables: str) -> None:
        self.compose("up", "--detach", "--no-build", **variables)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Return when both containers have ended with 0."""
        until = time.monotonic() + seconds
        while (states := self.states()) != ["exited 0"] * 2:
            assert time.monotonic() < until, f"{states}\n{self.logs()[-3000:]}"
            time.sleep(0.5)

    def states(self) -> list[str]:
        form = "{{.State.Status}} {{.State.ExitCode}}"
        names = self.docker("ps", "--all", "--quiet").split()
        return [self.docker("inspect", "--format", form, one).strip() for one in names]

    def restarts(self) -> list[int]:
        """How often each container was started again."""
        names = self.docker("ps", "--all", "--quiet").split()
        form = "{{.RestartCount}}"
        return [int(self.docker("inspect", "--format", form, one)) for one in names]

    def logs(self) -> str:
        return self.compose("logs", "--no-color")

    def main_process(self, service: str) -> int:
        """The pid, on this machine, of a container's first process."""
        name = self.compose("ps", "--quiet", service).strip()
        return int(self.docker("inspect", "--format", "{{.State.Pid}}", name))


@contextlib.contextmanager
def virtual_docker(folder: Path) -> Iterator[VirtualDocker]:
    order = [
        DAEMON,
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
        f"--host=unix://{folder}/sock",
    ]
    with (folder / "dockerd.log").open("w") as log:
        process = subprocess.Popen(order, stdout=log, stderr=log)
    engine = VirtualDocker(folder)
    try:
        until = time.monotonic() + PATIENCE_S
        while not is_up(engine):
            if process.poll() is not None:
                raise NoEngineError((folder / "dockerd.log").read_text()[-400:])
            assert time.monotonic() < until, "dockerd never answered"
            time.sleep(0.2)
        empty_tar = b"\0" * 10240
        engine.docker("import", "-", "distlab-empty", given=empty_tar)
        (folder / "binds.yaml").write_text(yaml.safe_dump(binds()))
        try:
            yield engine
        finally:
            engine.compose("down", "--volumes", "--timeout", "1")
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_up(engine: VirtualDocker) -> bool:
    with contextlib.suppress(AssertionError):
        engine.docker("version")
        return True
    return False


def binds() -> dict[str, Any]:
    """What the shipped compose file lacks where the image is empty."""
    folders = [*SYSTEM, sys.prefix, sys.base_prefix, str(ROOT)]
    there = [one for one in dict.fromkeys(folders) if Path(one).exists()]
    node = {
        "working_dir": str(ROOT),
        "tmpfs": ["/tmp"],
        "environment": {"PYTHONPATH": str(ROOT), "HOME": "/runs", "PATH": PATH},
        "volumes": [f"{one}:{one}:ro" for one in there],
    }
    return {"services": {"node0": node, "node1": node}}
