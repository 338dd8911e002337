"""Two nodes on this machine: network namespaces with a link between them.

    node 0  addresses[0] ──veth0──port0──┐
                                       bridge0
    node 1  addresses[1] ──veth1──port1──┘

Everything belongs to the namespaces in which you call this (see `unshare --user --net`)
and disappears with them, so the machine's own network doesn't change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence


class NamespaceError(RuntimeError):
    """Raised if the machine lacks something; names the command and what it printed."""


def within(pid: int) -> tuple[str, ...]:
    """Return the head of a command that runs on the node of process `pid`."""
    return "nsenter", "--net", "--target", str(pid)


@contextlib.contextmanager
def two_nodes(addresses: Sequence[str]) -> Iterator[list[int]]:
    """Create two namespaces on one bridge; yield the pid of a process in each.

    Raises:
        NamespaceError: this machine can't create them.
    """
    must("ip", "link", "add", "bridge0", "type", "bridge")
    must("ip", "link", "set", "bridge0", "up")
    holders = [
        subprocess.Popen(["unshare", "--net", "sleep", "3600"]) for _ in addresses
    ]
    try:
        for node, holder in enumerate(holders):
            _wait_until_apart(holder.pid)
            _connect(node, holder.pid, addresses[node])
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def must(*command: str) -> None:
    """Run a command that has to succeed.

    Raises:
        NamespaceError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise NamespaceError(f"{' '.join(command)}: {said}")


def _connect(node: int, pid: int, address: str) -> None:
    near, far = f"port{node}", f"veth{node}"
    must("ip", "link", "add", near, "type", "veth", "peer", "name", far)
    must("ip", "link", "set", near, "master", "bridge0", "up")
    must("ip", "link", "set", far, "netns", str(pid))
    must(*within(pid), "ip", "link", "set", "lo", "up")
    must(*within(pid), "ip", "addr", "add", f"{address}/24", "dev", far)
    must(*within(pid), "ip", "link", "set", far, "up")


def _wait_until_apart(pid: int) -> None:
    ours = os.readlink("/proc/self/ns/net")
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") != ours:
                return
        time.sleep(0.01)
    raise NamespaceError("unshare --net gave no namespace within 10 s")
