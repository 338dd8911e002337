"""A counter with a log on its disk, and its clients: a service small enough to break.

A client adds numbers, each under a name of its own, and asks again until it is told
that it is done. Each number is a digit of its own in base 16: the sum says how often
each one was added.
"""

from __future__ import annotations

import zlib

from distlab.comm import Disk, PeerLost, ServiceContext
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, SimRun, run

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
HORIZON_S = 1.0
RANKS, ADDS = 3, 5
EXPECTED = sum(1 << 4 * digit for digit in range(RANKS * ADDS))


class Counter:
    """The right one: what it has told is on the disk, and nothing is added twice."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.added: dict[bytes, int] = {}
        self.recover()

    def recover(self) -> None:
        """Read the log up to where it is torn, and begin it anew with what is whole."""
        names = self.disk.names()
        whole = whole_part(self.disk.read("log")) if "log" in names else b""
        for line in whole.splitlines():
            name, amount = line.split()[1:]
            self.added[name] = int(amount)
        self.disk.write("log.tmp", whole)
        self.disk.sync("log.tmp")
        self.disk.rename("log.tmp", "log")
        self.disk.sync_folder()

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """`add NAME AMOUNT` or `sum`; or `wait COUNT`, until so many are there."""
        what, *words = message.split()
        if what == b"add":
            name, amount = words
            if name not in self.added:
                self.put(name, int(amount))
            return b"added"
        if what == b"wait" and len(self.added) < int(words[0]):
            return None
        return str(self.total()).encode()

    def total(self) -> int:
        return sum(self.added.values())

    def put(self, name: bytes, amount: int) -> None:
        self.log(name, amount)
        self.disk.sync("log")
        self.added[name] = amount

    def log(self, name: bytes, amount: int) -> None:
        record = b"%s %d" % (name, amount)
        self.disk.append("log", b"%08x %s\n" % (zlib.crc32(record), record))


def whole_part(log: bytes) -> bytes:
    """The lines of a log before the first one that is torn."""
    end = 0
    for line in log.splitlines(keepends=True):
        if line[-1:] != b"\n" or line[:8] != b"%08x" % zlib.crc32(line[9:-1]):
            break
        end += len(line)
    return log[:end]


class AcknowledgesFirst(Counter):
    """Syncs what it told the last time before it tells the next thing."""

    def put(self, name: bytes, amount: int) -> None:
        self.disk.sync("log")
        self.log(name, amount)
        self.added[name] = amount


class ForgetsNames(Counter):
    """Adds again what is asked again."""

    def __init__(self, disk: Disk) -> None:
        self.sum = 0
        super().__init__(disk)
        self.sum += sum(self.added.values())

    def put(self, name: bytes, amount: int) -> None:
        super().put(name, amount)
        self.sum += amount
        del self.added[name]

    def total(self) -> int:
        return self.sum


class RemembersInMemory(ForgetsNames):
    """Knows what it has added only until it crashes."""

    def recover(self) -> None:
        super().recover()
        self.sum, self.added = sum(self.added.values()), {}

    def __init__(self, disk: Disk) -> None:
        self.sum = 0
        Counter.__init__(self, disk)

    def put(self, name: bytes, amount: int) -> None:
        Counter.put(self, name, amount)
        self.sum += amount


class TrustsTheTail(Counter):
    """Goes on behind a torn line."""

    def recover(self) -> None:
        if "log" not in self.disk.names():
            super().recover()
            return
        for line in whole_part(self.disk.read("log")).splitlines():
            name, amount = line.split()[1:]
            self.added[name] = int(amount)


class ForgetsTheFolder(Counter):
    """Syncs the log, and not the folder in which it is new."""

    def recover(self) -> None:
        if "log" in self.disk.names():
            super().recover()
        else:
            self.disk.write("log", b"")
            self.disk.sync("log")


WRONG = [
    AcknowledgesFirst, ForgetsNames, RemembersInMemory, TrustsTheTail, ForgetsTheFolder,
]  # fmt: skip


def client(ctx: RankContext) -> int:
    """Add this rank's numbers, and read the sum when all must be done."""
    for k in range(ADDS):
        digit = ctx.rank * ADDS + k
        ask(ctx, b"add %d %d" % (digit, 1 << 4 * digit))
        ctx.clock.sleep(HORIZON_S / ADDS)
    ctx.clock.sleep(max(0.0, 20 * HORIZON_S - ctx.clock.now_s()))
    return int(ask(ctx, b"sum"))


def ask(ctx: RankContext, message: bytes) -> bytes:
    """Call the counter until it answers."""
    assert ctx.endpoint
    while True:
        try:
            return ctx.endpoint.call("counter", message, 0.05)
        except PeerLost:
            ctx.clock.sleep(0.01)


def counted(kind: type[Counter], faults: Faults) -> SimRun:
    """One run under these faults."""

    def make(context: ServiceContext) -> Counter:
        return kind(context.disk)

    services = {"counter": make}
    return run(client, RANKS, net=NET, faults=faults, services=services, journal=False)


def fails(kind: type[Counter], faults: Faults) -> bool:
    """Whether a number was lost or added twice, or a client never came to its end."""
    return counted(kind, faults).values != [EXPECTED] * RANKS
