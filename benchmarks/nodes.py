"""Two nodes on this machine, with links of 100 Mbit: how long a training step takes.

    node 0  10.77.0.1 ──veth──┐
                              bridge        each node sends at most 100 Mbit/s (tc tbf)
    node 1  10.77.0.2 ──veth──┘

Each node is a network namespace with one agent of distlab.launch and one rank. All
of it is inside another one that ends with the benchmark: nothing of this machine's
network is changed, and no right is needed where users may have namespaces.

    step        median of 12 steps; least and most beside it
    sent        bytes that left node 0 in a step, by its interface's counter
    at least    what these bytes take at 100 Mbit/s

Where the machine lacks something, it says what, and ends with 0.

    make nodes      distlab bench nodes [--json]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # it is a script, also inside the namespaces

from distlab.chaos.namespaces import (  # noqa: E402
    NamespaceError,
    must,
    two_nodes,
    within,
)

MBIT = 100
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("unshare", "nsenter", "ip", "tc")
RANK = Path(__file__).with_name("_nodes_rank.py")
INSIDE = "--inside"
LIMIT_S = 400.0


class SkippedError(Exception):
    """This machine lacks something; the message names it."""


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table; the exit code."""
    as_json = "--json" in arguments
    try:
        expect_tools()
        if INSIDE not in arguments:
            return enter(arguments)
        rows = measure()
    except (SkippedError, NamespaceError) as skipped:
        skip(str(skipped), as_json)
        return 0
    if as_json:
        print(json.dumps({"mbit": MBIT, "rows": rows, "load": os.getloadavg()[0]}))
    else:
        print("\n".join(table(rows)))
    return 0


def skip(reason: str, as_json: bool) -> None:
    """Say that nothing was measured, and why."""
    print(json.dumps({"skipped": reason}) if as_json else f"skipped: {reason}")


def expect_tools() -> None:
    """See that the programs are here.

    Raises:
        SkippedError: one is not.
    """
    if not sys.platform.startswith("linux"):
        raise SkippedError(f"network namespaces are Linux's; this is {sys.platform}")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise SkippedError(f"there is no program {tool} (package iproute2)")


def enter(arguments: Sequence[str]) -> int:
    """Run this again in a user and network namespace that ends with it.

    Raises:
        SkippedError: the system does not let us have one.
    """
    new = ["unshare", "--user", "--map-root-user", "--net"]
    tried = subprocess.run([*new, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise SkippedError(f"unshare --user --net: {tried.stderr.strip()}")
    own = [sys.executable, __file__, INSIDE, *arguments]
    return subprocess.run(
        [*new, "--fork", "--kill-child", *own], check=False
    ).returncode


def measure() -> dict[str, dict[str, float]]:
    """Build the two nodes, train on them, and return what rank 0 measured.

    Raises:
        NamespaceError: the kernel lacks a part.
    """
    with two_nodes(ADDRESSES) as pids, tempfile.TemporaryDirectory() as folder:
        for node, pid in enumerate(pids):
            shape(node, pid)
        result = Path(folder) / "result.json"
        agents = [start_agent(node, pids[node], folder, result) for node in (0, 1)]
        try:
            codes = [agent.wait(timeout=LIMIT_S) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        if any(codes):
            sys.stderr.write((Path(folder) / "agent_0.txt").read_text())
            sys.exit(f"the agents ended with {codes}")
        rows: dict[str, dict[str, float]] = json.loads(result.read_text())
    return rows


def shape(node: int, pid: int) -> None:
    """Let the node of `pid` send at most 100 Mbit/s."""
    rate = ("rate", f"{MBIT}mbit", "burst", "64kb", "latency", "100ms")
    qdisc = ("tc", "qdisc", "add", "dev", f"veth{node}", "root", "tbf", *rate)
    must(*within(pid), *qdisc)


def start_agent(
    node: int, pid: int, folder: str, result: Path
) -> subprocess.Popen[bytes]:
    """An agent of distlab.launch with one rank, in the namespace of `pid`.

    gloo listens on the interface of master_addr: the agent sees to that.
    """
    command = [*within(pid), sys.executable]
    command += ["-m", "distlab.launch", "--nnodes", "2", "--node-rank", str(node)]
    command += ["--master-addr", ADDRESSES[0], "--log-dir", folder]
    command += ["--start-timeout", "120", str(RANK), str(result)]
    with open(Path(folder) / f"agent_{node}.txt", "wb") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
        )


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """A line for each way."""
    first = rows["one bucket"]["step_s"]
    lines = [
        f"two nodes, {MBIT} Mbit/s; one rank each, 1 M parameters, float32; "
        f"load {os.getloadavg()[0]:.1f}",
        f"{'':17} {'step':>8} {'least–most':>15} {'sent':>9} {'at least':>9}"
        f" {'of one bucket':>14}",
    ]
    for name, row in rows.items():
        sent_mb = row["sent_bytes"] / 1e6
        spread = f"{row['least_s']:.3f}–{row['most_s']:.3f}"
        lines.append(
            f"{name:17} {row['step_s']:6.3f} s {spread:>13} s {sent_mb:6.3f} MB"
            f" {sent_mb * 8 / MBIT:7.3f} s {row['step_s'] / first:13.2f}×"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
