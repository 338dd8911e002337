"""Compare a collective with the other ranks' before torch starts it.

How this works. The ranks of a machine share one file in memory. Before its k-th call
in a group, a rank writes the call into its own slot and then reads the others' slots.
Whichever of two ranks comes second sees the other's call, because each writes before it
reads. So a disagreement is found without a message and before gloo could abort the
process, or add up tensors of different dtypes.

Ranks on other machines aren't compared. Nor are calls that torch starts from C++.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import tempfile
from typing import Any
from zlib import crc32

from distlab.recorder.journal import Act

_AREAS = 509  # groups; of two that share an area, one isn't compared
_KEPT = 32  # newest calls of a group
_SLOT = 512  # bytes
_HEAD = struct.Struct("<QQII")  # number, group and call as hashes, length of the text
_SHOWN = 4  # tensors of a call
BY_OUTPUTS = ("all_gather", "all_gather_into_tensor", "scatter")
"""Collectives whose outputs must be equally large on all ranks, not their inputs."""
ANY_SIZE = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "barrier")
"""Collectives whose ranks may differ in both."""


class Agreement:
    """The shared file, as seen by one rank.

    Example: `Agreement(path, rank=5, local_ranks=range(4, 8)).compare(act)`
    puts what ranks 4, 6 and 7 called instead into `act.others`.
    """

    def __init__(self, path: str, rank: int, local_ranks: range) -> None:
        self._rank, self._local = rank, local_ranks
        self._counts: dict[str, int] = {}
        self._size = _SLOT * _KEPT * len(local_ranks)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._size * _AREAS)

    def compare(self, act: Act) -> None:
        """Write the call down, and note what other ranks called instead."""
        members = act.members
        number = self._counts[act.group] = self._counts.get(act.group, 0) + 1
        key = crc32(repr((act.group, members)).encode())
        told = _told(act)
        text = json.dumps(
            told
            | {
                "rank": self._rank,
                "place": act.place,
                "inputs": act.inputs[:_SHOWN],
                "outputs": act.outputs[:_SHOWN],
                "takes": act.takes,
                "gives": act.gives,
            }
        ).encode()
        text = text if len(text) <= _SLOT - _HEAD.size else b"{}"
        is_like = crc32(repr(told).encode())
        base = key % _AREAS * self._size + number % _KEPT * _SLOT
        mine = base + (self._rank - self._local.start) * _SLOT * _KEPT
        self._memory[mine + _HEAD.size : mine + _HEAD.size + len(text)] = text
        # The number comes last, and a reader only takes the slot with its own number.
        _HEAD.pack_into(self._memory, mine, 0, key, is_like, len(text))
        _HEAD.pack_into(self._memory, mine, number, key, is_like, len(text))
        for rank in members:
            if rank == self._rank or rank not in self._local:
                continue
            theirs = base + (rank - self._local.start) * _SLOT * _KEPT
            n, k, like, length = _HEAD.unpack_from(self._memory, theirs)
            if n != number or k != key or (like == is_like and not act.gives):
                continue
            start = theirs + _HEAD.size
            with contextlib.suppress(ValueError):
                other = json.loads(self._memory[start : start + length])
                is_whole = _HEAD.unpack_from(self._memory, theirs)[0] == number
                if (
                    is_whole
                    and other
                    and (like != is_like or _unlike(act, self._rank, other))
                ):
                    act.others.append(other)


def _told(act: Act) -> dict[str, Any]:
    """Return what must be the same on all ranks, such as the number of elements."""
    size = None
    if act.op not in ANY_SIZE:
        tensors = act.outputs if act.op in BY_OUTPUTS else act.inputs
        size = sum(map(math.prod, tensors))
    return {
        "op": act.op,
        "size": size,
        "dtype": act.dtype if act.op != "barrier" else "",
        "root": act.root,
        "reduce_op": act.reduce_op,
    }


def _unlike(act: Act, rank: int, other: dict[str, Any]) -> bool:
    """Return True if an all-to-all doesn't give a rank as much as it takes, or back."""
    me, them = act.members.index(rank), act.members.index(other["rank"])
    try:
        gives, takes = other["gives"][me], other["takes"][me]
        return bool(gives != act.takes[them] or takes != act.gives[them])
    except IndexError:
        return False


def create(num_local: int) -> str:
    """Make an empty shared file for this many ranks; return its path.

    Raises:
        OSError: there is no room for it.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="distlab-", dir=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.truncate(_SLOT * _KEPT * num_local * _AREAS)
    return path


def remove(store: Any, key: str) -> None:
    """Remove the file whose path is in the store, if ranks ended before all had it."""
    if store.check([key]):
        with contextlib.suppress(OSError):
            os.unlink(store.get(key).decode())
