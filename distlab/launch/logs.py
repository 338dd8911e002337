"""Write rank_<r>.log, and show its lines on the terminal.

Each rank writes to its own file, so nothing is lost if the agent dies, and no rank has
to wait for a slow terminal. The agent reads the files as they grow. Because it does so
in a separate thread, a slow terminal never keeps it from noticing that a rank failed.

One file per rank holds both streams, unless `Output` treats them differently. In that
case, stderr goes to rank_<r>.stderr.log.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.launch.config import LaunchError
from distlab.launch.output import STDERR, STDOUT, Output
from distlab.launch.records import read_record
from distlab.launch.streams import TERMINAL

LOOK_S = 0.05  # between two looks at the files
TAIL_BYTES = 1 << 16  # of a log, in which the last lines are looked for
READ_BYTES = 1 << 20
LEFT_BYTES = 1 << 20
"""How much of each log we still show when a job has failed."""
LAST_S = 10.0  # how long the terminal may take for that
PROGRESS_S = 3.0  # between two states of a progress bar, whose line doesn't end
_LONGEST = 1 << 16  # of a line without an end
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)


class Stream:
    """A file that a rank writes to while we read it."""

    def __init__(self, path: Path, kind: int, *, is_new: bool) -> None:
        self.path, self.kind = path, kind
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.descriptor = os.open(path, flags | os.O_TRUNC * is_new, 0o644)
        self._read = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at = os.lseek(self._read, 0, os.SEEK_END)
        self._given_back = 0
        self._rest = b""
        self._bar, self._bar_s = b"", math.inf  # last shown, and when

    @property
    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self._read).st_size

    def read(self, until: int) -> list[bytes]:
        """Return the next whole lines before offset `until`, at most READ_BYTES."""
        piece = os.pread(
            self._read, max(0, min(READ_BYTES, until - self._at)), self._at
        )
        self._at += len(piece)
        if not piece:
            return []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def progress(self, now_s: float) -> list[bytes]:
        """Return the newest state of a progress bar, at most one in PROGRESS_S.

        A bar such as tqdm's returns to the start of its line, which may take hours to
        end. A bar that ends sooner than PROGRESS_S is an ordinary line.
        """
        if b"\r" not in self._rest:
            self._bar_s = math.inf
            return []
        state = _newest_state(self._rest)  # the older ones are of no use now
        self._rest = b"\r" + state + b"\r" * self._rest.endswith(b"\r")
        if self._bar_s == math.inf:
            self._bar_s = now_s
        if now_s < self._bar_s + PROGRESS_S or state in (self._bar, b""):
            return []
        self._bar, self._bar_s = state, now_s
        return [state]

    def rest(self) -> list[bytes]:
        """Return an unfinished last line, once the rank has stopped writing."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def is_read(self, until: int) -> bool:
        """Return True if we have read the file up to this size."""
        return self._at >= until

    def skip(self, until: int) -> int:
        """Skip all but the last LEFT_BYTES before `until`; return how many bytes."""
        begin = until - LEFT_BYTES
        if begin <= self._at:
            return 0
        newline = os.pread(self._read, TAIL_BYTES, begin).find(b"\n")
        left_out = begin + newline + 1 - self._at
        self._at, self._rest = begin + newline + 1, b""
        return left_out

    def give_back(self) -> None:
        """Free the disk space of what we have read, except the last lines (Linux)."""
        end = self._at - TAIL_BYTES
        if (
            sys.platform.startswith("linux")
            and end - self._given_back > 64 * READ_BYTES
        ):
            libc, offset = ctypes.CDLL(None), ctypes.c_int64
            length = end - self._given_back
            mode = _KEEP_SIZE | _PUNCH_HOLE
            libc.fallocate(
                self.descriptor, mode, offset(self._given_back), offset(length)
            )
            self._given_back = end

    def last_lines(self, begin: int, count: int) -> list[str]:
        """Return the last nonempty lines that were written after `begin`."""
        size = self.size
        begin = max(begin, size - TAIL_BYTES)
        text = os.pread(self._read, size - begin, begin)
        lines = [_as_text(line) for line in text.split(b"\n") if line.strip()]
        return lines[-count:]

    def mark(self, line: str) -> None:
        """Write a line of our own."""
        size = self.size
        if size and os.pread(self._read, 1, size - 1) != b"\n":
            line = "\n" + line
        with contextlib.suppress(OSError):  # a full disk must not stop the job
            os.write(self.descriptor, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
        os.close(self._read)


class RankLog:
    """The log file of one rank, or two with separate streams; a restart appends to it.

    `is_new` clears what an earlier launch has left in it. `is_kept` means that the file
    stays after this launch.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        name: str = "",
        *,
        is_new: bool = True,
        is_split: bool = False,
        is_kept: bool = True,
    ) -> None:
        self.rank, self.path = rank, folder / (name or f"rank_{rank}.log")
        self.is_kept = is_kept
        self.error_file = self.path.with_suffix(".error.json")
        both = STDOUT | STDERR
        kind = STDOUT if is_split else both
        self.streams = [Stream(self.path, kind, is_new=is_new)]
        if is_split:
            path = folder / f"rank_{rank}.stderr.log"
            self.streams.append(Stream(path, STDERR, is_new=is_new))
        self._began = [0 for _ in self.streams]  # where this generation's lines begin

    @property
    def descriptor(self) -> int:
        """The file descriptor for a rank's stdout."""
        return self.streams[0].descriptor

    @property
    def stderr(self) -> int:
        """The file descriptor for a rank's stderr."""
        return self.streams[-1].descriptor

    def begin(self, generation: int) -> None:
        """Prepare for a new process; mark its start in the log if it is a restart."""
        with contextlib.suppress(OSError):
            self.error_file.unlink(missing_ok=True)
        for stream in self.streams:
            if generation > 1:
                stream.mark(f"--- start {generation} of this rank ---\n")
        self._began = [stream.size for stream in self.streams]

    def last_lines(self, count: int) -> list[str]:
        """Return the newest process's last lines, from stderr if it is separate."""
        for stream, began in zip(
            reversed(self.streams), reversed(self._began), strict=True
        ):
            if lines := stream.last_lines(began, count):
                return lines
        return []

    @property
    def where(self) -> str:
        """The file's path for a report; empty if we delete it after the launch."""
        return str(self.path.absolute()) if self.is_kept else ""

    def record(self) -> dict[str, Any]:
        """Return what torch's @record has written about the rank's exception."""
        return read_record(self.error_file)

    def close(self) -> None:
        """Close the files."""
        for stream in self.streams:
            stream.close()


class Terminal:
    """Shows the lines of all logs, each with its rank in front.

    If `gives_back` is set, the logs aren't kept, so we free the disk space of lines
    that have been shown.
    """

    def __init__(
        self,
        logs: Mapping[int, RankLog],
        show: Callable[[str], None],
        output: Output | None = None,
        *,
        local_rank: Callable[[int], int] = lambda rank: rank,
        gives_back: bool = False,
    ) -> None:
        self._logs, self._show, self._output = logs, show, output or Output()
        self._local_rank, self._gives_back = local_rank, gives_back
        self._changed = threading.Condition()
        self._wanted = self._done = 0  # looks
        self._ended: set[int] = set()  # ranks that have stopped writing
        self._is_over = self._is_late = False
        self.left_out: list[Path] = []
        """The files that we did not show in full."""
        self._thread = threading.Thread(target=self._follow, daemon=True, name=TERMINAL)
        self._thread.start()

    def catch_up(self, ranks: Sequence[int] = (), *, within_s: float = 1.0) -> None:
        """Show everything so far, with the unfinished last line of ended `ranks`.

        If the terminal takes longer than `within_s`, it continues in the background.
        """
        with self._changed:
            self._ended |= set(ranks)
            self._wanted += 1
            mine = self._wanted
            self._changed.notify_all()
            limit_s = None if math.isinf(within_s) else within_s
            self._changed.wait_for(lambda: self._done >= mine, limit_s)

    def hurry(self) -> None:
        """Show only the end of long logs from now on, because the job has failed."""
        self._is_late = True

    def close(self) -> None:
        """Show the rest and stop; after `hurry`, take no longer than LAST_S."""
        with self._changed:
            self._ended |= set(self._logs)
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(LAST_S if self._is_late else None)

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._wanted > self._done or self._is_over, LOOK_S
                )
                wanted, is_over, ended = self._wanted, self._is_over, {*self._ended}
            with contextlib.suppress(OSError):  # the files are closed after LAST_S
                self._look(ended)
            with self._changed:
                self._done = wanted
                self._ended -= ended
                self._changed.notify_all()
            if is_over:
                return

    def _look(self, ended: set[int]) -> None:
        """Show everything so far, one piece of each file in turn."""
        streams = [
            (log, stream, stream.size)
            for log in list(self._logs.values())
            for stream in log.streams
        ]
        while streams:
            for log, stream, until in streams:
                if self._is_late and (left_out := stream.skip(until)):
                    self._say_what_is_left_out(log, stream, left_out)
                self._show_lines(log, stream, stream.read(until))
                if self._gives_back:
                    stream.give_back()
            streams = [entry for entry in streams if not entry[1].is_read(entry[2])]
        for log in list(self._logs.values()):
            for stream in log.streams:
                self._show_lines(log, stream, stream.progress(time.monotonic()))
        for rank in ended & self._logs.keys():
            for stream in self._logs[rank].streams:
                self._show_lines(self._logs[rank], stream, stream.rest())

    def _show_lines(self, log: RankLog, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        local_rank = self._local_rank(log.rank)
        prefix = self._output.prefix(log.rank, local_rank)
        if self._output.filters(stream.kind):
            tagged = [prefix + _as_text(line) for line in lines]
            self._output.duplicate(stream.path.parent, stream.kind, tagged)
        if self._output.shows(local_rank, stream.kind):
            self._show("".join(f"{prefix}{_as_text(line)}\n" for line in lines))

    def _say_what_is_left_out(
        self, log: RankLog, stream: Stream, num_bytes: int
    ) -> None:
        if stream.path not in self.left_out:
            self.left_out.append(stream.path)
        local_rank = self._local_rank(log.rank)
        if self._output.shows(local_rank, stream.kind):
            prefix = self._output.prefix(log.rank, local_rank)
            megabytes = num_bytes / 1e6
            self._show(f"{prefix}… {megabytes:.1f} MB more are in {stream.path}\n")


class Folder:
    """The folder for logs, which is the user's or a temporary one for this launch.

    Raises:
        LaunchError: the system can't create a temporary folder.
    """

    def __init__(self, given: str | Path | None, *, is_kept: bool = True) -> None:
        self.is_kept = is_kept or given is not None
        if given is not None:
            self.path = Path(given)
            return
        with _writing("a temporary folder"):
            self.path = Path(tempfile.mkdtemp(prefix="distlab-launch-"))

    def close(self) -> None:
        """Remove the folder unless it is to be kept."""
        if not self.is_kept:
            shutil.rmtree(self.path, ignore_errors=True)


def open_logs(
    folder: Folder, ranks: Sequence[int], is_split: Callable[[int], bool]
) -> dict[int, RankLog]:
    """Open empty logs for these ranks; create the folder if necessary.

    Raises:
        LaunchError: we can't write them.
    """
    logs: dict[int, RankLog] = {}
    with _writing(folder.path), contextlib.ExitStack() as stack:
        folder.path.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            logs[rank] = RankLog(
                rank, folder.path, is_split=is_split(rank), is_kept=folder.is_kept
            )
            stack.callback(logs[rank].close)
        stack.pop_all()
    return logs


def open_another(
    logs: dict[int, RankLog], rank: int, folder: Path, *, is_split: bool = False
) -> None:
    """Open the log of a rank that has moved here from another node."""
    is_kept = all(log.is_kept for log in logs.values())
    logs[rank] = RankLog(rank, folder, is_new=False, is_split=is_split, is_kept=is_kept)


@contextlib.contextmanager
def _writing(where: str | Path) -> Iterator[None]:
    """Turn an error of the system in this block into one that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(
            f"can't write the logs in {where}: {reason}; name another folder with "
            "--log-dir"
        ) from error


def _as_text(line: bytes) -> str:
    return _newest_state(line).decode(errors="replace")


def _newest_state(line: bytes) -> bytes:
    """Return what a line shows in the end if it goes back to its start, as bars do."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
