"""What is done to the processes of a run from outside: kill, freeze, thaw, restart.

Orders may be given from any thread, also in `on_report`. The supervisor carries them
out one after another, each as soon as it can be: a restart waits for the death.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distlab.runner.doors import Door
from distlab.runner.posts import Post, open_posts
from distlab.runner.record import RankRecord
from distlab.runner.zygote_protocol import send_request

Kind = Literal["kill", "freeze", "thaw", "restart"]
_SIGNALS = {
    "kill": "SIGKILL",
    "freeze": "SIGSTOP",
    "thaw": "SIGCONT",
    "restart": "SIGKILL",
}


def signal_of(kind: Kind) -> int:
    """Return the signal that carries out an order, on a system that has it."""
    return signal.Signals[_SIGNALS[kind]]


@dataclass
class Order:
    """One of them; `number` counts ranks first, then services."""

    kind: Kind
    number: int
    is_begun: bool = False


class Orders:
    """The orders of one run that are not carried out yet."""

    def __init__(self, names: Sequence[str], may_die: frozenset[int]) -> None:
        self.names, self.may_die = list(names), may_die
        self._waiting: deque[Order] = deque()
        self._read, self._wake = socket.socketpair()
        self._read.setblocking(False)
        self._wake.setblocking(False)

    def give(self, kind: Kind, who: int | str) -> None:
        """Have it done; returns at once.

        Raises:
            ValueError: nobody is called that, or its death was not declared.
        """
        number = number_of(who, self.names)
        if kind in ("kill", "restart") and number not in self.may_die:
            raise ValueError(f"{self.names[number]} was not named in may_die")
        self._waiting.append(Order(kind, number))
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            self._wake.send(b"x")

    def fileno(self) -> int:
        """Readable once there is an order."""
        return self._read.fileno()

    def first(self) -> Order | None:
        """The next one to carry out."""
        return self._waiting[0] if self._waiting else None

    def done(self) -> None:
        """The first one has been carried out."""
        self._waiting.popleft()

    def quiet(self) -> None:
        """Take back the alarm."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Take no more orders."""
        self._read.close()
        self._wake.close()


class Hands:
    """Carries orders out through the zygote."""

    def __init__(
        self,
        zygote: socket.socket,
        orders: Orders,
        doors: Sequence[Door],
        on_post: Callable[[int, Post], None],
    ) -> None:
        self._zygote, self.orders, self._doors = zygote, orders, doors
        self._on_post = on_post
        self._restarting: set[int] = set()

    @property
    def are_busy(self) -> bool:
        """Whether a process is still to be started again, or an order waits."""
        return bool(self._restarting) or self.orders.first() is not None

    def carry_out(self, records: Sequence[RankRecord], dead: set[int]) -> None:
        """Do what can be done now; `dead` are the numbers of those that have died."""
        while (order := self.orders.first()) is not None:
            record = records[order.number]
            if order.number in self._restarting or not record.pid:
                return  # it is about to start
            is_dead = order.number in dead
            if not is_dead and not order.is_begun:
                order.is_begun = True
                self._ask(
                    {"k": "signal", "pid": record.pid, "signal": signal_of(order.kind)}
                )
            if order.kind == "restart":
                if not is_dead:
                    return
                self._start_again(order.number, record)
            self.orders.done()

    def started(self, number: int) -> None:
        """It has been started again."""
        self._restarting.discard(number)

    def _start_again(self, number: int, record: RankRecord) -> None:
        self._restarting.add(number)
        request = {
            "k": "again",
            "number": number,
            "pid": record.pid,
            "lives": len(record.deaths) + 1,
        }
        (post,) = open_posts(
            [self._doors[number]], lambda descriptors: self._ask(request, descriptors)
        )
        self._on_post(number, post)

    def _ask(
        self, request: dict[str, Any], descriptors: list[int] | None = None
    ) -> None:
        self._zygote.setblocking(True)
        try:
            send_request(self._zygote, request, descriptors)
        except OSError:  # the supervisor is about to read that the zygote is gone
            pass
        finally:
            self._zygote.setblocking(False)


def number_of(who: int | str, names: Sequence[str]) -> int:
    """Which process a rank, or a service's name, stands for.

    Raises:
        ValueError: none of this run.
    """
    name = f"rank {who}" if isinstance(who, int) else who
    if name not in names:
        raise ValueError(f"{name} is none of this run: {', '.join(names)}")
    return list(names).index(name)
