"""Runs as Chakra execution traces, read back from protobuf's wire format."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from distlab.sim import AlphaBeta
from distlab.sim.torch.script import Script, run_script
from distlab.trace import to_chakra

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weights, square = torch.ones(1000), torch.ones(100, 100)
for _ in range(2):
    work = dist.all_reduce(weights, async_op=True)
    square @ square
    work.wait()
square @ square
if dist.get_rank() == 0:
    dist.send(weights, 1, tag=3)
else:
    dist.recv(weights, 0, tag=3)
dist.barrier()
"""
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
_VALUES = {
    "is_cpu_op": 27, "comm_type": 9, "comm_size": 9, "comm_src": 7, "comm_dst": 7,
    "comm_tag": 7, "pg_name": 29, "duration_us": 3, "line": 29,
}  # fmt: skip
"""The field of each attribute's value; Chakra's own reader looks at no other one."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of one message by their numbers."""
    found: dict[int, list[Any]] = defaultdict(list)
    value: Any
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        else:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        found[key >> 3].append(value)
    return found


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The version of a trace, and its nodes."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = varint(data, at)
        messages.append(fields(data[at : at + length]))
        at += length
    head, *nodes = messages
    return head[1][0].decode(), [node_of(one) for one in nodes]


def node_of(message: dict[int, list[Any]]) -> dict[str, Any]:
    after, at = [], 0
    packed = b"".join(message[5])
    while at < len(packed):
        number, at = varint(packed, at)
        after.append(number)
    facts = {}
    for attribute in map(fields, message[10]):
        name = attribute[1][0].decode()
        assert attribute.keys() == {1, _VALUES[name]}
        facts[name] = attribute[_VALUES[name]][0]
    first = {name: message[field][0] for name, field in (("id", 1), ("type", 3))}
    times = {"start_us": message[6][0], "duration_us": message[7][0]}
    return {**first, **times, "name": message[2][0].decode(), "after": after, **facts}


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    net = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
    done = run_script(Script("program.py"), 2, net=net, flops_per_s=1e9)
    return to_chakra(done.require_finished(), tmp_path / "traces")


def test_each_rank_has_a_graph_of_what_it_did(traces: list[Path]) -> None:
    assert [path.name for path in traces] == ["rank.0.et", "rank.1.et"]
    version, nodes = read(traces[0])
    assert version == "0.0.4"
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    kinds = [(node["name"], node["type"], node["after"]) for node in nodes]
    assert kinds == [
        ("all_reduce", COLLECTIVE, []),
        ("compute", COMPUTE, []),  # it hides the reduction
        ("all_reduce", COLLECTIVE, [1, 0]),
        ("compute", COMPUTE, [1, 0]),
        ("compute", COMPUTE, [3, 2]),
        ("send", SEND, [4]),
        ("barrier", COLLECTIVE, [4, 5]),
    ]
    products = [node for node in nodes if node["name"] == "compute"]
    assert all(node["duration_us"] == 2000 for node in products)
    reduced = nodes[0]
    assert (reduced["comm_type"], reduced["comm_size"]) == (0, 4000)
    assert reduced["pg_name"] == b"world"
    assert reduced["line"] == b"program.py:6"
    assert nodes[-1]["comm_type"] == 9


def test_both_ends_of_a_message_name_it_alike(traces: list[Path]) -> None:
    ends = []
    for path, kind in zip(traces, (SEND, RECEIVE), strict=True):
        (node,) = [node for node in read(path)[1] if node["type"] == kind]
        ends.append([node[name] for name in ("comm_src", "comm_dst", "comm_tag")])
    assert ends == [[0, 1, 3]] * 2
