"""The parent's side of one run: read what the ranks write, decide when it is over."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distlab.runner.board import Board, find_cycle
from distlab.runner.limits import Limits
from distlab.runner.record import ErrorRecord, Outcome, RankRecord, Run, RunnerError
from distlab.runner.wire import decode

CONFIRM_S = 0.1  # a deadlock is looked at twice, this far apart
SETTLE_S = 0.3  # after a first failure, how long the others may take to show theirs
_FRAME = re.compile(r'File "(.+)", line (\d+)')


class Supervisor:
    """Watches the ranks of one run until an outcome is certain."""

    def __init__(
        self,
        zygote: socket.socket,
        controls: list[socket.socket],
        outputs: list[int],
        *,
        folder: Path,
        limits: Limits,
        on_report: Callable[[int, Any], None] | None,
    ) -> None:
        self._limits = limits
        self._folder = folder
        self._on_report = on_report or (lambda rank, value: None)
        self._records = [RankRecord(rank=rank) for rank in range(len(controls))]
        self._board = Board(len(controls))
        self._lost: set[int] = set()  # control closed, exit status not yet known
        self._statuses: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[object, bytes] = {}
        self._listen(zygote, self._from_zygote)
        for rank, control in enumerate(controls):
            self._listen(control, partial(self._from_rank, rank))
        for rank, output in enumerate(outputs):
            self._selector.register(output, selectors.EVENT_READ, rank)
        self._zygote = zygote
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._suspect: tuple[float, dict[int, tuple[int, ...]]] | None = None

    def watch(self) -> Run:
        """Block until the outcome is certain.

        Raises:
            RunnerError: the zygote is gone.
        """
        outcome = None
        try:
            while outcome is None:
                self._read(self._patience())
                outcome = self._outcome()
            return self._conclude(outcome)
        finally:
            self._selector.close()

    def unread(self) -> bytes:
        """What the zygote has begun to say and not finished."""
        return self._buffers[self._zygote]

    # ── reading ─────────────────────────────────────────────────────────────────────

    def _listen(self, source: socket.socket, handle: Callable[[bytes], None]) -> None:
        source.setblocking(False)
        self._buffers[source] = b""
        self._selector.register(source, selectors.EVENT_READ, handle)

    def _patience(self) -> float:
        now = time.monotonic()
        until = self._started + self._limits.seconds
        if self._suspect:
            until = min(until, self._suspect[0] + CONFIRM_S)
        if self._failed_at is not None:
            until = min(until, self._failed_at + SETTLE_S)
        return max(0.0, until - now)

    def _read(self, timeout_s: float) -> bool:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if isinstance(key.data, int):
                self._read_output(key.fd, key.data)
            else:
                self._read_lines(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(ready)

    def _read_lines(
        self, source: socket.socket, handle: Callable[[bytes], None]
    ) -> None:
        try:
            piece = source.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            self._selector.unregister(source)
            handle(b"")
            return
        *lines, self._buffers[source] = (self._buffers[source] + piece).split(b"\n")
        for line in lines:
            handle(line)

    def _read_output(self, descriptor: int, rank: int) -> None:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            self._selector.unregister(descriptor)
            return
        record = self._records[rank]
        room = self._limits.output_bytes - len(record.output)
        record.output += piece.decode(errors="replace")[: max(0, room)]

    def _from_zygote(self, line: bytes) -> None:
        if not line:
            raise RunnerError("the process that starts ranks has died; run it again")
        message = decode(line)
        if message["k"] == "started":
            for record, pid in zip(self._records, message["pids"], strict=True):
                record.pid = pid
        elif message["k"] == "exit":
            self._statuses[message["pid"]] = message["status"]
        self._note_deaths()

    def _from_rank(self, rank: int, line: bytes) -> None:
        record = self._records[rank]
        if not line:
            self._lost.add(rank)
            self._note_deaths()
            return
        message = decode(line)
        kind = message.get("k")
        if kind == "result":
            record.status = "finished"
            record.value = message["value"]
            record.sent_bytes = message["sent_bytes"]
            record.messages = message["messages"]
            record.in_calls_s = message["in_calls_s"]
        elif kind == "raised":
            record.status = "raised"
            record.error = _error(message)
            self._note_failure()
        elif kind == "report":
            self._on_report(rank, message["value"])
        elif kind != "ready":
            self._note_event(rank, message)

    def _note_event(self, rank: int, event: dict[str, Any]) -> None:
        record = self._records[rank]
        if len(record.journal) < self._limits.journal_events:
            record.journal.append(event)
        self._board.record(rank, event)

    def _note_deaths(self) -> None:
        for rank in list(self._lost):
            record = self._records[rank]
            if record.pid in self._statuses:
                self._lost.discard(rank)
                if record.status == "running":
                    record.status = "died"
                    record.exit_status = self._statuses[record.pid]
                    self._note_failure()

    def _note_failure(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    # ── deciding ────────────────────────────────────────────────────────────────────

    def _alive(self) -> list[int]:
        return [r.rank for r in self._records if r.status == "running"]

    def _outcome(self) -> Outcome | None:
        now, alive = time.monotonic(), self._alive()
        stuck = self._board.stuck(alive) if alive else None
        if self._failed_at is not None:
            if not alive or stuck or now >= self._failed_at + SETTLE_S:
                died = any(record.status == "died" for record in self._records)
                return "died" if died else "raised"
            return None
        if not alive:
            return "finished"
        if self._confirmed(stuck, now):
            return "deadlock"
        return "timeout" if now >= self._started + self._limits.seconds else None

    def _confirmed(self, stuck: dict[int, tuple[int, ...]] | None, now: float) -> bool:
        if stuck is None:
            self._suspect = None
            return False
        if self._suspect is None or self._suspect[1] != stuck:
            self._suspect = (now, stuck)
            return False
        return now >= self._suspect[0] + CONFIRM_S

    def _conclude(self, outcome: Outcome) -> Run:
        seconds = time.monotonic() - self._started
        alive = self._alive()
        waits_for = self._board.stuck(alive) or {}
        for rank in alive:
            self._records[rank].waiting = self._board.blocked_in(rank)
            if self._records[rank].waiting:
                self._records[rank].status = "waiting"
        if outcome == "timeout":
            self._take_stacks(alive)
        while self._read(0.0):  # what was printed just before the end
            pass
        return Run(
            world_size=len(self._records),
            outcome=outcome,
            ranks=tuple(self._records),
            seconds=seconds,
            limit_s=self._limits.seconds,
            waits_for=waits_for,
            cycle=find_cycle(waits_for),
        )

    def _take_stacks(self, alive: list[int]) -> None:
        for rank in alive:
            if self._records[rank].pid:
                os.kill(self._records[rank].pid, signal.SIGUSR1)
        time.sleep(CONFIRM_S)
        for rank in alive:
            path = self._folder / f"stack{rank}"
            text = path.read_text(errors="replace") if path.exists() else ""
            frames = [(file, int(line)) for file, line in _FRAME.findall(text)]
            self._records[rank].stack = tuple(reversed(frames))


def _error(message: dict[str, Any]) -> ErrorRecord:
    return ErrorRecord(
        type=message["type"],
        message=message["message"],
        frames=tuple((file, line) for file, line in message["frames"]),
        refused=message["refused"],
    )
