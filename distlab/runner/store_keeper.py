"""The store of a run is kept by the parent: it outlives every rank, and needs no fork.

Its server has no thread; the supervisor drives it whenever something has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlab.comm.key_values import KeyValues
from distlab.comm.tcp.endpoint import STORE
from distlab.comm.tcp.server import Server
from distlab.runner.doors import Door
from distlab.runner.rank import directory_of

__all__ = ["STORE", "keep_store"]


def keep_store(door: Door, job: dict[str, Any], others: Mapping[str, Door]) -> Server:
    """A server behind `door`; writes into `job` where everybody can be called."""
    everyone = {**others, STORE: door}
    job["addresses"] = {name: list(one.address) for name, one in everyone.items()}
    directory = directory_of(job)
    return Server(
        door.listen(),
        directory.identity(),
        STORE,
        KeyValues(),
        max_frame_bytes=directory.max_frame_bytes,
    )
