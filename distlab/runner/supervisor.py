"""The parent's side of one run: read what the ranks write, decide when it is over."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distlab.comm.tcp.server import Server
from distlab.processes.tree import end_sessions, is_stopped
from distlab.runner import stacks
from distlab.runner.asking import ANSWERED, ASKS
from distlab.runner.autopsy import explain, own_frame
from distlab.runner.board import Board, find_cycle
from distlab.runner.doors import Door
from distlab.runner.incoming import FLOOD, record_in
from distlab.runner.last_call import path_of, read_call
from distlab.runner.limits import Limits
from distlab.runner.orders import Hands, Orders
from distlab.runner.posts import Post
from distlab.runner.printed import Printed
from distlab.runner.record import (
    ErrorRecord,
    Outcome,
    RankRecord,
    Run,
    RunCancelledError,
    RunnerError,
)
from distlab.runner.suspicion import Suspicion
from distlab.runner.wire import decode, encode

ASK_S = 0.1  # between two looks at whether the outcome is still wanted
MAX_LINE_BYTES = 1 << 28  # of one record; kept in memory until its end has come
LAST_READS = 8  # of 64 KiB each: more than a pipe holds, and a flood has an end
SETTLE_S = 0.3  # after a first failure, how long the others may take to show theirs
STACKS_S = 0.1  # that the ranks get to write their stacks


class Supervisor:
    """Watches the ranks of one run until an outcome is certain."""

    def __init__(
        self,
        zygote: socket.socket,
        posts: list[Post],
        *,
        world_size: int,
        orders: Orders,
        doors: Sequence[Door],
        keeper: Server | None = None,
        folder: Path,
        limits: Limits,
        on_report: Callable[[int, Any], None] | None,
        is_unwanted: Callable[[], bool] | None = None,
    ) -> None:
        self._is_unwanted = is_unwanted
        self._limits = limits
        self._folder = folder
        self._on_report = on_report or (lambda rank, value: None)
        # All processes: the ranks, and after them the services.
        self._everyone = [RankRecord(rank=number) for number in range(len(posts))]
        self._records = self._everyone[:world_size]
        self._posts = posts
        self._orders = orders
        self._hands = Hands(zygote, orders, doors, self._take_post)
        self._board = Board(world_size, limits.seconds)
        self._printed = Printed(len(posts), limits.output_bytes)
        self._dead: set[int] = set()
        self._lost: set[int] = set()  # control closed, exit status not yet known
        self._statuses: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[object, bytearray] = {}
        self._listen(zygote, self._from_zygote)
        for number, post in enumerate(posts):
            self._listen_to(number, post)
        if keeper is not None:
            self._selector.register(keeper, selectors.EVENT_READ, keeper)
        self._selector.register(orders, selectors.EVENT_READ, orders)
        self._zygote = zygote
        self._started = self._heard = time.monotonic()
        self._failed_at: float | None = None
        self._suspicion = Suspicion(self._records, self._board)

    def watch(self) -> Run:
        """Block until the outcome is certain.

        Raises:
            RunnerError: the zygote is gone.
            RunCancelledError: nobody wants to know any more.
        """
        outcome = None
        try:
            while outcome is None:
                self._read(self._patience())
                self._hands.carry_out(self._everyone, self._dead)
                if self._is_unwanted and self._is_unwanted():
                    raise RunCancelledError
                outcome = self._outcome()
            return self._conclude(outcome)
        finally:
            self._selector.close()

    def unread(self) -> bytes:
        """What the zygote has begun to say and not finished."""
        return bytes(self._buffers[self._zygote])

    # ── reading ─────────────────────────────────────────────────────────────────────

    def _listen(self, source: socket.socket, handle: Callable[[bytes], None]) -> None:
        source.setblocking(False)
        self._buffers[source] = bytearray()
        self._selector.register(source, selectors.EVENT_READ, handle)

    def _listen_to(self, number: int, post: Post) -> None:
        self._listen(post.control, partial(self._from_rank, number))
        self._selector.register(post.output, selectors.EVENT_READ, number)

    def _take_post(self, number: int, post: Post) -> None:
        """A process is being started again: these are its lines."""
        old, self._posts[number] = self._posts[number], post
        with contextlib.suppress(KeyError):  # it was closed: nothing more comes
            self._selector.unregister(old.output)
            self._everyone[number].output += self._printed.rest(number, old.output)
        self._buffers.pop(old.control, None)
        old.close()
        self._listen_to(number, post)

    def _patience(self) -> float:
        now = time.monotonic()
        until = self._ends_at()
        until = min(until, self._suspicion.until)
        if self._failed_at is not None:
            until = min(until, self._failed_at + SETTLE_S)
        if self._is_unwanted:
            until = min(until, now + ASK_S)
        return max(0.0, until - now)

    def _ends_at(self) -> float:
        """When the time is up, if no rank says anything more."""
        in_all, idle = self._limits.seconds, self._limits.idle_s
        return min(self._started + in_all, self._heard + idle)

    def _read(self, timeout_s: float) -> bool:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj not in self._selector.get_map():
                continue  # a handler before this one has heard it out
            if isinstance(key.data, Server):
                key.data.step(0)
            elif key.data is self._orders:
                self._orders.quiet()
            elif isinstance(key.data, int):
                self._read_output(key.fd, key.data)
            else:
                self._read_lines(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(ready)

    def _read_lines(
        self, source: socket.socket, handle: Callable[[bytes], None]
    ) -> bool:
        try:
            piece = source.recv(1 << 20)
        except BlockingIOError:
            return False
        except ConnectionError:
            piece = b""
        if not piece:
            self._selector.unregister(source)
            handle(b"")
            return False
        buffer = self._buffers[source]
        buffer += piece
        if b"\n" in piece:
            *lines, rest = bytes(buffer).split(b"\n")
            buffer[:] = rest
            for line in lines:
                handle(line)
        elif len(buffer) > MAX_LINE_BYTES:
            buffer.clear()
            handle(encode(FLOOD))
        return True

    def _read_output(self, descriptor: int, rank: int) -> None:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            self._selector.unregister(descriptor)
            return
        self._everyone[rank].output += self._printed.text(rank, piece)

    def _from_zygote(self, line: bytes) -> None:
        if not line:
            end_sessions({record.pid for record in self._everyone} - {0})
            raise RunnerError("the process that starts ranks has died; run it again")
        message = decode(line)
        if message["k"] == "started":
            for record, pid in zip(self._everyone, message["pids"], strict=True):
                record.pid = pid
        elif message["k"] == "again":
            self._begin_again(message["number"], message["pid"])
        elif message["k"] == "exit":
            self._statuses[message["pid"]] = message["status"]
            for record in self._everyone:
                if record.pid == message["pid"]:
                    self._hear_out(record.rank)
        self._note_deaths()

    def _hear_out(self, rank: int) -> None:
        """Read the last words of a dead rank; a child of it may keep the line open."""
        control, handle = self._posts[rank].control, partial(self._from_rank, rank)
        with contextlib.suppress(KeyError):  # it is closed, and not listened to
            self._selector.get_key(control)
            while self._read_lines(control, handle):
                pass
            self._selector.unregister(control)
        self._lost.add(rank)

    def _begin_again(self, number: int, pid: int) -> None:
        record = self._everyone[number]
        record.deaths.append(self._statuses[record.pid])
        record.pid, record.status, record.exit_status = pid, "running", None
        record.value, record.error, record.failed_s = None, None, None
        self._dead.discard(number)
        self._board.forget(number)
        self._hands.started(number)

    def _from_rank(self, rank: int, line: bytes) -> None:
        record = self._everyone[rank]
        self._heard = time.monotonic()
        if not line:
            self._lost.add(rank)
            self._note_deaths()
            return
        message = record_in(line)
        if message is None:
            return
        kind = message["k"]
        if kind == "result":
            record.status = "finished"
            record.value = message["value"]
            record.sent_bytes = message["sent_bytes"]
            record.messages = message["messages"]
            record.in_calls_s = message["in_calls_s"]
        elif kind == "raised":
            record.status = "raised"
            record.error = error_record(message)
            self._note_failure(record)
        elif kind == "report":
            record.marks.append(len(record.journal))
            self._on_report(rank, message["value"])
        elif kind in (ASKS, ANSWERED):
            if self._orders.may_die and kind == ASKS:
                message["timeout_s"] = 0.0  # told of a death, a service may yet reply
            self._board.ask(rank, message)
        elif kind != "ready":
            self._note_event(rank, message)

    def _note_event(self, rank: int, event: dict[str, Any]) -> None:
        record = self._everyone[rank]
        if len(record.journal) < self._limits.journal_events:
            record.journal.append(event)
        self._board.record(rank, event)

    def _note_deaths(self) -> None:
        for rank in list(self._lost):
            record = self._everyone[rank]
            if record.pid in self._statuses:
                self._lost.discard(rank)
                self._dead.add(rank)
                if record.status == "running":
                    record.status = "died"
                    record.exit_status = self._statuses[record.pid]
                    self._read_stack(rank)  # a crash has left it there
                    if rank not in self._orders.may_die:
                        self._note_failure(record)

    def _note_failure(self, record: RankRecord) -> None:
        now = time.monotonic()
        record.failed_s = now - self._started
        if self._failed_at is None:
            self._failed_at = now

    # ── deciding ────────────────────────────────────────────────────────────────────

    def _alive(self) -> list[int]:
        return [r.rank for r in self._records if r.status == "running"]

    def _outcome(self) -> Outcome | None:
        now, alive = time.monotonic(), self._alive()
        # A rank whose line is closed is dead or dying, whatever it entered last.
        stuck = self._board.stuck(alive) if alive and not self._lost else None
        if self._failed_at is not None:
            failed = [r for r in self._everyone if r.failed_s is not None]
            died = any(record.status == "died" for record in failed)
            # Who waits for a dead rank is about to learn of it; a rank that raised is
            # parked, so who waits for that one learns nothing more.
            settled = self._suspicion.confirmed(stuck, now) if died else bool(stuck)
            is_early = now < self._failed_at + SETTLE_S
            if is_early and (self._lost or (not died and self._misses_a_service())):
                return None  # of a process it is not known yet how it died
            if not alive or settled or now >= self._failed_at + SETTLE_S:
                return "died" if died else "raised"
            return None
        if self._hands.are_busy:
            pass  # a process is about to be stopped, or to start again
        elif not alive:
            return "finished"
        elif self._suspicion.confirmed(stuck, now):
            return "deadlock"
        return "timeout" if now >= self._ends_at() else None

    def _misses_a_service(self) -> bool:
        """Whether a rank has lost a peer, and no process is known to have died.

        A rank may tell its error before the line of a dead service is seen to close.
        """
        errors = [record.error for record in self._records if record.error]
        has_services = len(self._everyone) > len(self._records)
        is_told = any(error.peer_lost for error in errors)
        return has_services and is_told and not self._dead

    def _conclude(self, outcome: Outcome) -> Run:
        now = time.monotonic()
        idle = outcome == "timeout" and now < self._started + self._limits.seconds
        alive = self._alive()
        waits_for = self._board.stuck(alive) or {}
        for rank in alive:
            self._records[rank].waiting = self._board.blocked_in(rank)
            if self._records[rank].waiting:
                self._records[rank].status = "waiting"
        if outcome == "timeout":
            self._take_stacks(alive)
        for _ in range(LAST_READS):  # what was printed just before the end
            if not self._read(0.0):
                break
        n = len(self._records)
        run = Run(
            world_size=n,
            outcome=outcome,
            ranks=tuple(self._records),
            seconds=now - self._started,
            limit_s=self._limits.seconds,
            idle_s=now - self._heard if idle else 0.0,
            waits_for=waits_for,
            cycle=find_cycle(waits_for),
            services=dict(zip(self._orders.names[n:], self._everyone[n:], strict=True)),
        )
        return replace(run, explanation=explain(run))

    def _take_stacks(self, alive: list[int]) -> None:
        for rank in alive:
            if self._records[rank].pid:
                self._records[rank].stopped = is_stopped(self._records[rank].pid)
                if stacks.ASKS_FOR_STACK is not None:
                    with contextlib.suppress(ProcessLookupError):  # it died just now
                        os.kill(self._records[rank].pid, stacks.ASKS_FOR_STACK)
        time.sleep(STACKS_S)
        for rank in alive:
            self._read_stack(rank)
            self._read_call(self._records[rank])

    def _read_call(self, record: RankRecord) -> None:
        """What it is in where no journal says it."""
        at = own_frame(record.stack)
        call = read_call(path_of(self._folder, record.rank), at)
        if call and record.status == "running":
            record.status, record.waiting = "waiting", call

    def _read_stack(self, rank: int) -> None:
        self._everyone[rank].stack = stacks.read_from(self._folder / f"stack{rank}")


def error_record(message: dict[str, Any]) -> ErrorRecord:
    """What `rank.raised` told."""
    return ErrorRecord(
        type=message["type"],
        message=message["message"],
        frames=tuple((file, line) for file, line in message["frames"]),
        refused=message["refused"],
        peer_lost=message["peer_lost"],
    )
