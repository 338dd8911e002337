"""A run as execution traces of MLCommons Chakra: one file for each rank.

A trace is a graph. Its nodes are stretches of compute, collectives and messages, and an
edge says that one had to be over before the other could begin. Simulators such as
ASTRA-sim read them, and play the same work on another network.

    compute ──▶ all_reduce ───────────────▶ compute    waited for before this one
       └──────▶ compute (what hides it) ──────┘

Sources: the schema,
https://github.com/mlcommons/chakra/blob/main/schema/protobuf/et_def.proto, and
src/feeder/et_feeder_node.cpp there for the names and types of attributes (it reads a
number of any other type as 0). A file is a sequence of protobuf messages, each behind
its length: first a GlobalMetadata, then the Nodes. We write those bytes ourselves,
which takes little code and no further package.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.runner import RankRecord, Run

VERSION = "0.0.4"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
KINDS = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4,
    "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
"""Chakra's numbers of the collectives."""
_US = 1e6


def to_chakra(run: Run, folder: Path | str) -> list[Path]:
    """Write `rank.0.et`, `rank.1.et`, … into `folder`; returns their paths.

    Raises:
        OSError: they cannot be written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for record in run.ranks:
        path = Path(folder) / f"rank.{record.rank}.et"
        with path.open("wb") as file:
            for message in (_text(1, VERSION), *_nodes(record)):
                file.write(_varint(len(message)) + message)
        paths.append(path)
    return paths


def _nodes(record: RankRecord) -> Iterator[bytes]:
    """The nodes of a rank, in the order in which they began."""
    ends = {e["n"]: e["t"] for e in record.journal if e["k"] in ("exit", "error")}
    ids: dict[int, int] = {}  # of calls
    since, number = 0.0, 0
    before: list[int] = []  # what the next stretch of compute comes after
    for event in record.journal:
        kind, at = event["k"], event.get("t", since)
        if event.get("op") == "new_group":
            continue
        if at > since and kind in ("enter", "post", "wait"):
            yield _node(number, "compute", COMPUTE, before, since, at, ())
            before, number = [number], number + 1
        if kind in ("enter", "post"):
            end = max(at, ends.get(event["n"], at))
            facts = _facts(record.rank, event)
            yield _node(number, event["op"], _type(event), before, at, end, facts)
            ids[event["n"]], number = number, number + 1
        elif kind in ("exit", "error") and event["n"] in ids:
            before = [*before, ids[event["n"]]]
        since = max(since, at)


def _type(event: Any) -> int:
    return {"send": SEND, "recv": RECEIVE}.get(event["op"], COLLECTIVE)


def _facts(rank: int, event: Any) -> tuple[bytes, ...]:
    members = event["members"]
    facts = [
        _attribute("comm_size", _number(9, event.get("bytes") or 0)),
        _attribute("pg_name", _text(29, event["group"])),
    ]
    op = event["op"]
    if op in KINDS:
        facts.append(_attribute("comm_type", _number(9, KINDS[op])))
    if op in ("send", "recv"):
        peer = event["dst"] if op == "send" else event["src"]
        peer = members[peer] if isinstance(peer, int) and peer >= 0 else rank
        src, dst = (rank, peer) if op == "send" else (peer, rank)
        ends = (("comm_src", src), ("comm_dst", dst), ("comm_tag", event["tag"]))
        facts += [_attribute(name, _number(7, value)) for name, value in ends]
    if event.get("file"):
        line = f"{event['file']}:{event['line']}"
        facts.append(_attribute("line", _text(29, line)))
    return tuple(facts)


def _node(
    number: int,
    name: str,
    kind: int,
    after: list[int],
    start_s: float,
    end_s: float,
    facts: tuple[bytes, ...],
) -> bytes:
    start_us = math.floor(start_s * _US)
    exact_us = round((end_s - start_s) * _US, 6)  # to the picosecond
    facts = (
        _attribute("is_cpu_op", _number(27, 0)),
        *facts,
        _attribute("duration_us", _double(3, exact_us)),
    )
    return b"".join(
        [
            _number(1, number),
            _text(2, name),
            _number(3, kind),
            _bytes(5, b"".join(map(_varint, after))) if after else b"",
            _number(6, start_us),
            _number(7, math.ceil(exact_us)),
            *(_bytes(10, fact) for fact in facts),
        ]
    )


# ── protobuf, https://protobuf.dev/programming-guides/encoding ──────────────────────


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, value: bytes) -> bytes:
    return _text(1, name) + value
