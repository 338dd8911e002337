"""The environment and the time limits of ranks that share one process.

Each real rank has its own environment, and if its program never ends, it is ended from
outside. Here we have to arrange both.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from distlab.runner import RankRecord, RunnerError
from distlab.runner.autopsy import own_frame, place
from distlab.sim.carriers import clear_in_thread, raise_in_thread
from distlab.sim.kernel import Kernel


class OutOfTime(BaseException):
    """Raised in the rank that is running when the wall clock has run out."""


class RankDied(BaseException):
    """Raise it in a rank in place of what would end its process.

    `status` is the exit status as `waitpid` gives it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class TimeIsUpError(RunnerError):
    """The wall clock ran out; `frames` are where the running rank was, as (file, line).

    They begin with the outermost.
    """

    def __init__(self, message: str, frames: tuple[tuple[str, int], ...]) -> None:
        super().__init__(message)
        self.frames = frames


class _ByRank(MutableMapping[bytes, bytes]):
    """The variables of the rank that runs, or those of the process outside ranks."""

    def __init__(
        self, kernel: Kernel, outside: MutableMapping[bytes, bytes], n: int
    ) -> None:
        self._kernel, self._outside, self._n = kernel, outside, n
        self._inside: dict[int, dict[bytes, bytes]] = {}

    def _own(self) -> MutableMapping[bytes, bytes]:
        fiber = self._kernel.current or self._kernel.handler
        if fiber is None:
            return self._outside
        if fiber.rank not in self._inside:
            number, count = str(fiber.rank), str(self._n)
            own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count}
            self._inside[fiber.rank] = {
                **self._outside,
                **{os.fsencode(k): os.fsencode(v) for k, v in own.items()},
            }
        return self._inside[fiber.rank]

    def __getitem__(self, key: bytes) -> bytes:
        return self._own()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._own()[key] = value

    def __delitem__(self, key: bytes) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


@contextmanager
def environment_by_rank(kernel: Kernel, world_size: int) -> Iterator[None]:
    """Within this block, make `os.environ` the running rank's own, with its RANK."""
    environment: Any = os.environ
    outside = environment._data
    environment._data = _ByRank(kernel, outside, world_size)
    try:
        yield
    finally:
        environment._data = outside


class _OutputByRank(io.TextIOBase):
    """Sends output to the rank that runs, or outside of ranks where it went before."""

    def __init__(
        self,
        kernel: Kernel,
        records: list[RankRecord],
        most: int,
        tell: Callable[[int, str], None] | None,
        otherwise: Any,
    ) -> None:
        self._kernel, self._records, self._most = kernel, records, most
        self._tell, self._otherwise = tell, otherwise

    def write(self, text: str) -> int:
        """Keep `text` as far as there is room for it."""
        fiber = self._kernel.current or self._kernel.handler
        if fiber is None:
            self._otherwise.write(text)
        elif not self._kernel.closing:
            record = self._records[fiber.rank]
            record.output += text[: max(0, self._most - len(record.output))]
            if self._tell is not None:
                self._tell(fiber.rank, text)
        return len(text)

    def close(self) -> None:
        """Do nothing, so that a rank can't close the stream for the others."""


@contextmanager
def output_by_rank(
    kernel: Kernel,
    records: list[RankRecord],
    most: int,
    tell: Callable[[int, str], None] | None = None,
) -> Iterator[None]:
    """Within this block, put everything that a rank prints into its record."""
    out, err = sys.stdout, sys.stderr
    sys.stdout = _OutputByRank(kernel, records, most, tell, out)
    sys.stderr = _OutputByRank(kernel, records, most, tell, err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


@contextmanager
def wall_limit(
    kernel: Kernel, limit_s: float | None, turn_limit_s: float | None
) -> Iterator[None]:
    """End a run that takes longer than `limit_s` by the wall clock; None is no limit.

    `turn_limit_s` limits how long a single rank may run without a call that waits,
    while no other rank gets a turn. We check this four times in each such period.

    Raises:
        TimeIsUpError: the message has the rank that was running and its line.
    """
    if limit_s is None and turn_limit_s is None:
        yield
        return
    over, here = threading.Event(), threading.get_ident()
    why: list[str] = []

    def watch() -> None:
        why.append(_time_is_up(kernel, limit_s, turn_limit_s, over))
        while not over.is_set():
            fiber = kernel.current
            raise_in_thread(fiber.strand.thread_id if fiber else here, OutOfTime)
            over.wait(0.2)  # once more, if it was caught

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except OutOfTime as error:
        frames = _frames(error)
        raise TimeIsUpError(why[0] + _where(kernel, frames), frames) from None
    finally:
        over.set()
        watcher.join()
        clear_in_thread(here)


def _time_is_up(
    kernel: Kernel,
    limit_s: float | None,
    turn_limit_s: float | None,
    over: threading.Event,
) -> str:
    """Wait until it is, or until the run is over; return what took too long."""
    started = since = time.monotonic()
    turn: object = None
    left = [] if limit_s is None else [limit_s]
    while not over.wait(min([*left, *([turn_limit_s / 4] if turn_limit_s else [])])):
        now = time.monotonic()
        if limit_s is not None and now - started >= limit_s:
            return f"the simulation was not done after {limit_s:g} s by the wall clock"
        if (kernel.current, kernel.now_ps) != turn:
            turn, since = (kernel.current, kernel.now_ps), now
        elif kernel.current and turn_limit_s and now - since >= turn_limit_s:
            return f"one rank went on for {turn_limit_s:g} s without a call that waits"
        left = [] if limit_s is None else [max(0.0, limit_s - (now - started))]
    return ""


def _frames(error: BaseException) -> tuple[tuple[str, int], ...]:
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    return tuple(frames)


def _where(kernel: Kernel, frames: tuple[tuple[str, int], ...]) -> str:
    fiber, at = kernel.ran_last, place(own_frame(frames))
    return f"; rank {fiber.rank} was at {at}" if fiber and at else ""
