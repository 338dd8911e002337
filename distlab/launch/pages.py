"""Share a page of memory between a process and its agent, with its trainer's state.

If a trainer sent a message for each call, it would keep the agent busy. So it writes
into the page, and the agent reads the page when it wants to know.

    step     the newest optimizer step that the process has completed, and when
    doing    compute, wait (in a call on its communicator) or save, and since when
    beat     when its second thread last ran
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator

from distlab.given.recovery import COMPUTE, SAVE, WAIT

PAGE = "DISTLAB_PAGE"
"""The environment variable with the descriptor of a process's page."""
BEAT_S = 0.1
_DOING = (COMPUTE, WAIT, SAVE)
_FIELD = struct.Struct("=d")
_STEP, _STEP_S, _DONE, _SINCE_S, _BEAT_S = range(5)
_SIZE = 5 * _FIELD.size


class Page:
    """A view of the page, for either side."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def new(cls) -> Page:
        """Create a page for a process that is about to start."""
        descriptor = os.memfd_create("distlab") if hasattr(os, "memfd_create") else -1
        os.ftruncate(descriptor, _SIZE)
        page = cls(descriptor)
        page._put(_STEP, -1)
        return page

    @classmethod
    def from_environment(cls) -> Page | None:
        """Open this process's page; return None if no agent watches it."""
        descriptor = os.environ.get(PAGE)
        return None if descriptor is None else cls(int(descriptor))

    # ── the trainer writes ──────────────────────────────────────────────────────────

    def completed(self, step: int) -> None:
        """Record that the process has completed this optimizer step."""
        self._put(_STEP_S, time.monotonic())
        self._put(_STEP, step)

    def does(self, what: str) -> None:
        """Record that the trainer is doing this from now on."""
        self._put(_SINCE_S, time.monotonic())
        self._put(_DONE, _DOING.index(what))

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Record that the trainer is doing this in the block; then restore it."""
        before = self.doing
        if what == before:
            yield
            return
        self.does(what)
        try:
            yield
        finally:
            self.does(before)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Record that the trainer is waiting for other ranks in the block."""
        return self.during(WAIT)

    def beat(self) -> None:
        """Record the time every BEAT_S from now on, in a separate thread."""
        threading.Thread(target=self._beat, daemon=True).start()

    # ── the agent reads ─────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Return the newest completed step, or -1."""
        return int(self._get(_STEP))

    @property
    def step_s(self) -> float:
        """Return when the newest step was completed."""
        return self._get(_STEP_S)

    @property
    def doing(self) -> str:
        """Return COMPUTE, WAIT or SAVE."""
        return _DOING[int(self._get(_DONE))]

    @property
    def since_s(self) -> float:
        """Return since when the trainer has been doing what `doing` says."""
        return self._get(_SINCE_S)

    @property
    def beat_s(self) -> float:
        """Return when the second thread last wrote."""
        return self._get(_BEAT_S)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)

    def _beat(self) -> None:
        while True:
            self._put(_BEAT_S, time.monotonic())
            time.sleep(BEAT_S)

    def _put(self, field: int, value: float) -> None:
        _FIELD.pack_into(self._memory, field * _FIELD.size, value)

    def _get(self, field: int) -> float:
        return float(_FIELD.unpack_from(self._memory, field * _FIELD.size)[0])
