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

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
    except SkippedError as skipped:
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
        SkippedError: the kernel lacks a part.
    """
    with two_nodes() as pids, tempfile.TemporaryDirectory() as folder:
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


@contextlib.contextmanager
def two_nodes() -> Iterator[list[int]]:
    """Two namespaces on one bridge; gives the pid of a process in each."""
    must("ip", "link", "add", "bridge0", "type", "bridge")
    must("ip", "link", "set", "bridge0", "up")
    holders = [
        subprocess.Popen(["unshare", "--net", "sleep", "3600"]) for _ in ADDRESSES
    ]
    try:
        for node, holder in enumerate(holders):
            wait_until_apart(holder.pid)
            connect(node, holder.pid)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def connect(node: int, pid: int) -> None:
    """Give the namespace of `pid` an interface of 100 Mbit/s on the bridge."""
    near, far = f"port{node}", f"veth{node}"
    must("ip", "link", "add", near, "type", "veth", "peer", "name", far)
    must("ip", "link", "set", near, "master", "bridge0", "up")
    must("ip", "link", "set", far, "netns", str(pid))
    inside = ("nsenter", "--net", "--target", str(pid))
    must(*inside, "ip", "link", "set", "lo", "up")
    must(*inside, "ip", "addr", "add", f"{ADDRESSES[node]}/24", "dev", far)
    must(*inside, "ip", "link", "set", far, "up")
    shape = ("rate", f"{MBIT}mbit", "burst", "64kb", "latency", "100ms")
    must(*inside, "tc", "qdisc", "add", "dev", far, "root", "tbf", *shape)


def must(*command: str) -> None:
    """Run it.

    Raises:
        SkippedError: it failed; the machine lacks what it asks for.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise SkippedError(f"{' '.join(command)}: {said}")


def wait_until_apart(pid: int) -> None:
    """Until `pid` is in a network namespace of its own."""
    ours = os.readlink("/proc/self/ns/net")
    for _ in range(1000):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") != ours:
                return
        time.sleep(0.01)
    raise SkippedError("unshare --net gave no namespace within 10 s")


def start_agent(
    node: int, pid: int, folder: str, result: Path
) -> subprocess.Popen[bytes]:
    """An agent of distlab.launch with one rank, in the namespace of `pid`.

    gloo listens on the interface of master_addr: the agent sees to that.
    """
    command = ["nsenter", "--net", "--target", str(pid), sys.executable]
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
