"""Two nodes in network namespaces, and a link between them that we cut.

    node 0  10.78.0.1 ──veth──┐
                              bridge    cut: node 1's end at the bridge is down
    node 1  10.78.0.2 ──veth──┘

The effect is that of a pulled cable: messages get lost, but connections stay open.
Everything is inside a user and network namespace that ends with this program, so the
machine's own network doesn't change.

    python -m distlab.chaos.partition SECONDS FOLDER NODES COMMAND …     inside of it
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distlab.chaos.faults import CUT, FIRED
from distlab.chaos.namespaces import must, two_nodes, within
from distlab.processes.tree import die_with_parent

ADDRESSES = ("10.78.0.1", "10.78.0.2")
START_TIMEOUT_S = 20  # that the agents wait for one another, also in a restart
LAST_CALL_S = 5  # that they wait for the other node where one node may go on
_NEW = ("unshare", "--user", "--map-root-user", "--net")
_LOOK_S = 0.01


@functools.cache
def why_not() -> str:
    """Return why this machine can't cut a link; "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no program {tool}"
    port = "ip link add b0 type bridge && ip link add p0 type veth peer name v0"
    tried = subprocess.run(
        [*_NEW, "sh", "-c", port], capture_output=True, text=True, check=False
    )
    said = " ".join(tried.stderr.split())
    return f"no network namespaces: {said}" if tried.returncode else ""


def inside(
    seconds: float, folder: Path, command: Sequence[str], min_nodes: int = 0
) -> list[str]:
    """Return the command that runs this program in new namespaces.

    `min_nodes` is the number of nodes, out of two, that the job needs to continue; 0
    means both.
    """
    nodes = f"{min_nodes}:2" if min_nodes else "2"
    own = [sys.executable, "-m", "distlab.chaos.partition", str(seconds), str(folder)]
    return [*_NEW, "--fork", "--kill-child", *own, nodes, *command]


def main(seconds: float, folder: Path, nodes: str, command: Sequence[str]) -> int:
    """Start an agent on each node, and cut the link when a rank asks for it.

    The exit code is that of node 0, which decides.
    """
    die_with_parent()
    with two_nodes(ADDRESSES) as pids:
        agents = [_agent(node, pids[node], nodes, command) for node in (0, 1)]
        try:
            while not (folder / FIRED).exists():
                if all(agent.poll() is not None for agent in agents):
                    break
                time.sleep(_LOOK_S)
            else:
                _cut(seconds, folder, agents)
            codes = [agent.wait() for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    return codes[0]


def _cut(
    seconds: float, folder: Path, agents: Sequence[subprocess.Popen[bytes]]
) -> None:
    must("ip", "link", "set", "port1", "down")
    (folder / CUT).touch()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(agent.poll() is not None for agent in agents):
            return
        time.sleep(_LOOK_S)
    must("ip", "link", "set", "port1", "up")


def _agent(
    node: int, pid: int, nodes: str, command: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the launcher of one node; `command` lacks the flags for several nodes."""
    launcher, rest = command[:3], command[3:]
    flags = ["--nnodes", nodes, "--node-rank", str(node)]
    flags += ["--master-addr", ADDRESSES[0], "--last-call", str(LAST_CALL_S)]
    flags += ["--start-timeout", str(START_TIMEOUT_S)]
    entered = [*within(pid), *launcher, *flags, *rest]
    return subprocess.Popen(entered)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
