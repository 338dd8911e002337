"""Processes that play ranks on any system: how they start apart from us, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

from distlab.runner.record import RunnerError


class NotHereError(RunnerError):
    """A program needs something that the ranks of this cluster don't have."""


def apart() -> dict[str, Any]:
    """Return arguments for Popen that keep Ctrl-C in the terminal from the process."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process and what it has forked, and return its status as waitpid does.

    On a system without process groups, we can't end the processes that it started.
    """
    try:
        process.wait(timeout=0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if hasattr(os, "killpg"):  # it leads a group of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return status_of(process.returncode)


def status_of(returncode: int) -> int:
    """Return the status that waitpid gives for the return code of a Popen."""
    return -returncode if returncode < 0 else (returncode & 0xFF) << 8
