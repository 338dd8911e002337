"""Begin to record in a rank, before its script imports torch."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distlab.attached import after_import
from distlab.attached import variables as attaching
from distlab.recorder.journal import Journal

if TYPE_CHECKING:
    from distlab.recorder.recorder import Judge

OWNER = "DISTLAB_RECORD_OWNER"
"""In a rank's environment: its process. Processes that it starts are no ranks."""
BUFFER = "256"
"""Calls that torch's flight recorder keeps. Reading one takes about 10 µs."""
_journal: Journal | None = None  # of this process


def variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment with which a rank's calls are recorded."""
    kept = inherited.get("TORCH_FR_BUFFER_SIZE", BUFFER)
    return {"TORCH_FR_BUFFER_SIZE": kept} | attaching(__name__, inherited)


def attach(judge: Judge | None = None) -> None:
    """Record the calls of this process, if it is a rank and uses torch.distributed.

    `judge` is for ranks without an agent that watches them.
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    owner = os.environ.get(OWNER, str(os.getpid()))
    if not rank or not size or owner != str(os.getpid()):
        return  # not a rank, or started by one
    os.environ[OWNER] = owner
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", BUFFER)
    global _journal
    journal = _journal = Journal()
    after_import(
        {
            "torch.distributed.distributed_c10d": functools.partial(
                _begin, journal, judge
            ),
            "torch.nn.parallel.distributed": journal.attach_ddp,
            # torch.compile shall not look into our wrappers
            "torch._dynamo.trace_rules": lambda rules: rules.add(Journal.__module__),
        }
    )


def pause(paused: bool) -> None:
    """Stop recording for a while, or go on: to measure what it costs."""
    if _journal is not None:
        _journal.active = not paused


def _begin(journal: Journal, judge: Judge | None, c10d: Any) -> None:
    if not hasattr(c10d, "ProcessGroup"):  # a torch without torch.distributed
        return
    from distlab.recorder.recorder import Recorder

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorder = Recorder(journal, rank, world_size, judge)
    journal.attach(c10d)
    journal.after_init = recorder.share  # type: ignore[method-assign]
    atexit.register(recorder.finish)
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        recorder.fail(error)
        hook(kind, error, trace)

    sys.excepthook = note
    recorder.start()
