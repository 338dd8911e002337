"""Before ranks connect: has each rank of the job come, once, and do all agree how many?

    rank/<r>    who this rank is: two processes can't be the same one
    size        WORLD_SIZE, as the first rank has it
    go          set once: empty when all have come, else what is wrong

A launcher that is started twice, or a variable that is wrong on one node, ends here, in
one sentence and on every rank. Without it, ranks would wait for each other until their
timeout, or two of them would train as one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

from distlab.comm import MeetingError
from distlab.distributed.environment import Place

_TOKEN = secrets.token_hex(8)
_LINGER_S = 0.5  # that rank 0 keeps its store for others to read what is wrong
_MOST_NAMED = 8


def check_in(store: Any, place: Place, timeout_s: float) -> None:
    """Wait until each rank of the job has come; collective. `store` is torch's.

    Raises:
        ValueError: two processes have the same rank, or ranks disagree about how many
            there are: on each rank that has come.
        MeetingError: a rank did not come within `timeout_s`.
    """
    if place.world_size == 1:
        return
    try:
        wrong = _enter(store, place) or _wait(store, place, timeout_s)
    except MeetingError:
        _linger(place)  # so that the others can say so, too
        raise
    except RuntimeError as error:  # torch's store: rank 0, which keeps it, has ended
        raise MeetingError(
            f"rank {place.rank} lost the store of the job at {_where(place)}: rank 0, "
            "or the launcher, has ended; its own error says why"
        ) from error
    if wrong:
        _linger(place)
        raise ValueError(wrong)


def report_second_keeper(store: Any, place: Place) -> None:
    """Tell the rank 0 that keeps `store` that this process is rank 0 as well."""
    _enter(store, place)


def _linger(place: Place) -> None:
    if place.rank == 0 and not place.has_agent:
        time.sleep(_LINGER_S)


def _enter(store: Any, place: Place) -> str:
    """Say that this rank is here; what is wrong with that."""
    rank, size = place.rank, place.world_size
    wrong = ""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    me = f"{process}|{_TOKEN}"
    seated = store.compare_set(f"rank/{rank}", "", me).decode()
    agreed = store.compare_set("size", "", f"{size}|{rank}").decode()
    theirs, _, first = agreed.partition("|")
    if seated != me:
        other = seated.partition("|")[0]
        wrong = (
            f"two processes are rank {rank}: {other}, and {process}; each needs a RANK "
            "of its own, and each job a MASTER_PORT of its own"
        )
    elif theirs != str(size):
        wrong = (
            f"WORLD_SIZE is {theirs} on rank {first}, but {size} on rank {rank}: it "
            "must be the same on all ranks"
        )
    elif store.add("arrived", 1) >= size:
        store.compare_set("go", "", "all")
    if wrong:
        store.compare_set("go", "", wrong)
    return wrong


def _wait(store: Any, place: Place, timeout_s: float) -> str:
    try:
        store.wait(["go"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [r for r in range(place.world_size) if not store.check([f"rank/{r}"])]
        if not missing:
            raise
        names = ", ".join(map(str, missing[:_MOST_NAMED]))
        names += ", …" * (len(missing) > _MOST_NAMED)
        ranks = f"rank{'s' * (len(missing) > 1)} {names}"
        raise MeetingError(
            f"rank {place.rank} waited {timeout_s:g} s for {ranks}, which did not "
            f"come: WORLD_SIZE is {place.world_size}, and all ranks must be started"
        ) from error
    said: str = store.get("go").decode()
    return "" if said == "all" else said


def _where(place: Place) -> str:
    assert place.address is not None
    return ":".join(map(str, place.address))
