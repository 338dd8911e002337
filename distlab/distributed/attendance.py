"""Before ranks connect, check that each has arrived once and all agree on their number.

    rank/<r>    which process claimed this rank, so that a second one can't
    size        WORLD_SIZE as the first rank knows it
    go          set once: "all" when every rank has arrived, otherwise the error

If you start the launcher twice, or a variable is wrong on one node, every rank stops
here with the same one-sentence error. Without this check, ranks would wait for each
other until they time out, or two processes would train as the same rank.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

from distlab.comm import MeetingError
from distlab.distributed.environment import Place, compares_calls

_TOKEN = secrets.token_hex(8)
_LINGER_S = 0.5  # how long rank 0 keeps its store open so others can read the error
_MOST_NAMED = 8


def check_in(store: Any, place: Place, timeout_s: float) -> None:
    """Wait until every rank of the job has arrived; collective. `store` is torch's.

    Raises:
        ValueError: two processes have the same rank, or the ranks disagree about the
            world size. Every rank that has arrived raises it.
        MeetingError: a rank did not arrive within `timeout_s`.
    """
    if place.world_size == 1:
        return
    try:
        wrong = _enter(store, place) or _wait(store, place, timeout_s)
    except MeetingError:
        _linger(place)  # so that the other ranks can report it too
        raise
    except RuntimeError as error:  # rank 0, which hosts torch's store, has exited
        raise MeetingError(
            f"rank {place.rank} lost the store of the job at {_where(place)}, because "
            "rank 0 or the launcher has exited; look for the reason in its own error"
        ) from error
    if wrong:
        _linger(place)
        raise ValueError(wrong)


def report_second_keeper(store: Any, place: Place) -> None:
    """Tell the rank 0 that hosts `store` that this process is rank 0 as well."""
    _enter(store, place)


def _linger(place: Place) -> None:
    if place.rank == 0 and not place.has_agent:
        time.sleep(_LINGER_S)


def _enter(store: Any, place: Place) -> str:
    """Register this rank; return the error, or "" if there is none."""
    rank, size = place.rank, place.world_size
    wrong = ""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    me = f"{process}|{_TOKEN}"
    seated = store.compare_set(f"rank/{rank}", "", me).decode()
    agreed = store.compare_set("size", "", f"{size}|{rank}").decode()
    compares = str(int(compares_calls()))
    others = store.compare_set("compare", "", compares).decode()
    theirs, _, first = agreed.partition("|")
    if seated != me:
        other = seated.partition("|")[0]
        wrong = (
            f"two processes are rank {rank}: {other}, and {process}; give each process "
            "its own RANK, and each job its own MASTER_PORT"
        )
    elif others != compares:
        wrong = (
            f"DISTLAB_COMPARE is {compares} on rank {rank}, but {others} on another "
            "rank: set it to the same value on all ranks"
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
            f"arrive: WORLD_SIZE is {place.world_size}, so start that many ranks"
        ) from error
    said: str = store.get("go").decode()
    return "" if said == "all" else said


def _where(place: Place) -> str:
    assert place.address is not None
    return ":".join(map(str, place.address))
