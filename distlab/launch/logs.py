"""rank_<r>.log, and its lines on the terminal.

A rank writes into its file itself: nothing is lost when the agent dies, and no rank
waits for a slow terminal. The agent reads the files as they grow.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOOK_S = 0.05  # between two looks at the files
TAIL_BYTES = 1 << 16  # of a log, in which the last lines are looked for
_READ_BYTES = 1 << 18
_LONGEST = 1 << 16  # of a line without an end


class Log:
    """The file of one rank; a restart appends to it.

    `is_new`: what the file holds is of an earlier launch, and goes.
    """

    def __init__(
        self, rank: int, folder: Path, name: str = "", *, is_new: bool = True
    ) -> None:
        self.rank, self.path = rank, folder / (name or f"rank_{rank}.log")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags | os.O_TRUNC * is_new, 0o644)
        self._read = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._read, 0, os.SEEK_END)
        self._began = 0  # where this generation's lines begin
        self._rest = b""

    def begin(self, generation: int) -> None:
        """A process is about to start; from the second on a line says so."""
        if generation > 1:
            line = f"--- start {generation} of this rank ---\n"
            if os.fstat(self.descriptor).st_size and not self._ends_with_newline():
                line = "\n" + line
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                os.write(self.descriptor, line.encode())
        self._began = os.fstat(self.descriptor).st_size

    def new_lines(self, *, is_over: bool = False) -> list[str]:
        """What has been written since the last call, whole lines, or all if over."""
        data = self._rest
        while piece := os.read(self._read, _READ_BYTES):
            data += piece
        *lines, self._rest = data.split(b"\n")
        if self._rest and (is_over or len(self._rest) > _LONGEST):
            lines.append(self._rest)
            self._rest = b""
        return [_as_text(line) for line in lines]

    def last_lines(self, count: int) -> list[str]:
        """The last lines of the process that ran last; empty ones are left out."""
        size = os.fstat(self._read).st_size
        begin = max(self._began, size - TAIL_BYTES)
        text = os.pread(self._read, size - begin, begin)
        lines = [_as_text(line) for line in text.split(b"\n") if line.strip()]
        return lines[-count:]

    def close(self) -> None:
        """Give the file up."""
        os.close(self.descriptor)
        os.close(self._read)

    def _ends_with_newline(self) -> bool:
        size = os.fstat(self._read).st_size
        return os.pread(self._read, 1, size - 1) == b"\n"


class Terminal:
    """Shows the lines of all logs, each after the rank that wrote it."""

    def __init__(self, logs: Mapping[int, Log], show: Callable[[str], None]) -> None:
        self._logs, self._show = logs, show
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def catch_up(self, ranks: Sequence[int] = ()) -> None:
        """Show what is there now; of `ranks`, which have ended, the last line too."""
        with self._lock:
            for rank, log in list(self._logs.items()):
                for line in log.new_lines(is_over=rank in ranks):
                    self._show(f"[rank {rank}] {line}\n")

    def close(self) -> None:
        """Show the rest, and stop."""
        self._is_over.set()
        self._thread.join()
        self.catch_up(list(self._logs))

    def _follow(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.catch_up()


def open_logs(folder: Path, ranks: Sequence[int]) -> dict[int, Log]:
    """The logs of these ranks, empty; the folder is made if it is not there.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs: dict[int, Log] = {}
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            logs[rank] = Log(rank, folder)
            stack.callback(logs[rank].close)
        stack.pop_all()
    return logs


def _as_text(line: bytes) -> str:
    # Of a progress bar, which goes back to the start of its line, the newest state.
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return shown.decode(errors="replace")
