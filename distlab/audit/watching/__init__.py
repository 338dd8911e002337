"""Hooks that see what a script does, without a change to it.

Nothing here judges. Each module hooks one part of torch, by its official global hooks
where there are any, and writes events into the log of the rank whose thread calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distlab.audit.log import AuditLog, Memory, attach

__all__ = ["installed", "watched"]


@contextmanager
def installed() -> Iterator[None]:
    """Within the block, threads that are `watched` write their logs."""
    from distlab.audit.watching import (
        collectives,
        loaders,
        losses,
        models,
        optimizers,
        randomness,
        saves,
    )
    from distlab.audit.watching.patches import Patches

    with ExitStack() as stack:
        patches = Patches(stack)
        parts = (models, optimizers, losses, loaders, collectives, randomness, saves)
        for part in parts:
            part.watch(patches)
        yield


@contextmanager
def watched(rank: int, folder: Path) -> Iterator[AuditLog]:
    """Within the block, this thread is that rank's, and the log is its."""
    from distlab.audit.watching.calls import TorchCalls

    memory = Memory(AuditLog(rank, folder))
    attach(memory)
    try:
        with TorchCalls(memory):
            yield memory.log
    finally:
        attach(None)
