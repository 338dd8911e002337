"""Two nodes on this machine, with links of 100 Mbit: how long a training step takes.

    node 0  10.77.0.1 ──veth──┐
                              bridge        each node sends at most 100 Mbit/s (tc tbf)
    node 1  10.77.0.2 ──veth──┘

Each node is a network namespace with one agent of distlab.launch and one rank. All
of it is inside another one that ends with the benchmark: nothing of this machine's
network is changed, and no right is needed where users may have namespaces.

    …_s           median of 12 steps; least and most beside it, and the time by that
                  of one bucket
    …_least_s     what the bytes take at 100 Mbit/s that left node 0 in a step, by its
                  interface's counter

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
from pathlib import Path

from benchmarks._bars import Bench, Line, Report
from distlab.chaos.namespaces import NamespaceError, must, two_nodes, within

ROOT = Path(__file__).parents[1]
BENCH = Bench("nodes", __doc__)
MBIT = 100
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("unshare", "nsenter", "ip", "tc")
RANK = Path(__file__).with_name("_nodes_rank.py")
LIMIT_S = 400.0


def measure(inside: bool = False) -> Report:
    """All figures; none if this machine lacks something, and then why.

    Args:
        inside: this process is in a namespace of its own.
    """
    try:
        expect_tools()
        if not inside:
            return enter()
        return BENCH.report(lines_of(train_on_both()))
    except NamespaceError as skipped:
        return BENCH.report([], skipped=str(skipped))


def reason(report: Report) -> list[str]:
    """Say that nothing was measured, and why."""
    return [f"skipped: {report['skipped']}"] if "skipped" in report else []


def expect_tools() -> None:
    """See that the programs are here.

    Raises:
        NamespaceError: one is not.
    """
    if not sys.platform.startswith("linux"):
        raise NamespaceError(f"network namespaces are Linux's; this is {sys.platform}")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise NamespaceError(f"there is no program {tool} (package iproute2)")


def enter() -> Report:
    """Measure in a user and network namespace that ends with this.

    Raises:
        NamespaceError: the system does not let us have one.
    """
    new = ["unshare", "--user", "--map-root-user", "--net"]
    tried = subprocess.run([*new, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise NamespaceError(f"unshare --user --net: {tried.stderr.strip()}")
    own = [sys.executable, "-m", "benchmarks.nodes", "--inside", "--json"]
    new += ["--fork", "--kill-child", *own]
    done = subprocess.run(new, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    report: Report = json.loads(done.stdout)
    return report


def train_on_both() -> dict[str, dict[str, float]]:
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


def lines_of(rows: dict[str, dict[str, float]]) -> list[Line]:
    """Two figures for each way."""
    first_s = rows["one bucket"]["step_s"]
    lines = []
    for name, row in rows.items():
        slug = name.replace(",", "").replace(" %", "").replace(" ", "_")
        note = f"{row['least_s']:.3f} to {row['most_s']:.3f} s"
        note += f", {row['step_s'] / first_s:.2f} of one bucket"
        sent = row["sent_bytes"]
        lines += [
            BENCH.line(f"{slug}_s", round(row["step_s"], 4), "s", note=note, **row),
            BENCH.line(f"{slug}_least_s", round(sent * 8 / MBIT / 1e6, 4), "s"),
        ]
    return lines


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, reason, inside=False))
