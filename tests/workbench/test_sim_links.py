"""Networks beside alpha and beta: times by hand, and tables that are broken."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Network, Wires, run
from distlab.sim.channels import Channel
from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import Metered, Ports, picoseconds
from distlab.sim.net.loggp import LogGP
from distlab.sim.net.nets import as_data, from_data
from distlab.sim.net.piecewise import Piecewise
from distlab.sim.plans.schedules import ring_all_reduce
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

ABSENT = os.strerror(errno.ENOENT)
US = 1_000_000
"""Picoseconds in a microsecond."""


def simulated_s(net: Network, world_size: int, program: Any, *args: Any) -> float:
    done = run(program, world_size, *args, net=net, journal=False)
    done.require_finished()
    return done.time_s


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


# ── ports: AlphaBeta, LogGP and tables book the same way ────────────────────────────


def train(wires: Wires, sizes: list[int]) -> list[tuple[int, int]]:
    """Messages from 0 to 1, all handed over at once; in microseconds."""
    booked = [wires.message(0, 1, size, 0) for size in sizes]
    return [(start // US, end // US) for start, end in booked]


LOGGP = LogGP(latency_s=7e-6, overhead_s=2e-6, gap_s=3e-6, gap_per_byte_s=1e-6)
MEASURED = Piecewise(table=((0, 4e-6), (10, 14e-6), (100, 23e-6)))


def test_alpha_beta_shares_the_way_and_not_the_latency() -> None:
    net = AlphaBeta(alpha_s=5e-6, bytes_per_s=1e6)
    assert train(net.wires(2), [4, 4, 1]) == [(0, 9), (4, 13), (8, 14)]


def test_loggp_of_one_message() -> None:
    # 2 overhead + 4 bytes after the first + 7 latency + 2 overhead
    assert train(LOGGP.wires(2), [5]) == [(0, 15)]
    assert LOGGP.message_s(5) == close_to(15e-6)


def test_loggp_of_a_train() -> None:
    # The next may start after (5 - 1) bytes and the gap; of 1 byte, after the gap.
    assert train(LOGGP.wires(2), [5, 1, 1]) == [(0, 15), (7, 18), (10, 21)]


def test_loggp_of_messages_without_a_gap_waits_for_the_processor() -> None:
    net = LogGP(latency_s=7e-6, overhead_s=2e-6, gap_s=0, gap_per_byte_s=0)
    assert train(net.wires(2), [1, 1]) == [(0, 11), (2, 13)]


def test_loggp_keeps_the_receiver_busy_as_long() -> None:
    wires = LOGGP.wires(3)
    assert wires.message(0, 2, 5, 0) == (0, 15 * US)
    assert wires.message(1, 2, 5, 0) == (7 * US, 22 * US)


@pytest.mark.parametrize(
    ("size", "us"), [(0, 4), (5, 9), (10, 14), (60, 19), (100, 23), (190, 32)]
)
def test_a_table_is_linear_in_between_and_goes_on(size: int, us: float) -> None:
    assert MEASURED.message_s(size) == close_to(us * 1e-6)
    (_, end), *_ = train(MEASURED.wires(2), [size])
    assert end == us


def test_a_table_that_ends_in_noise_does_not_make_bytes_free() -> None:
    net = Piecewise(table=((8, 5e-6), (16, 4e-6)))
    assert [net.message_s(s) for s in (1, 8, 16, 99)] == [5e-6, 5e-6, 4e-6, 4e-6]


def test_a_table_of_one_row_is_the_same_for_all() -> None:
    net = Piecewise(table=((1024, 5e-6),))
    assert [net.message_s(s) for s in (0, 1024, 9999)] == [5e-6] * 3


def test_a_tables_latencies_overlap() -> None:
    assert train(MEASURED.wires(2), [10, 10]) == [(0, 14), (10, 24)]


def ring(ctx: RankContext, count: int) -> None:
    ring_all_reduce(ctx.comm, torch.ones(count, dtype=torch.float64))


@pytest.mark.parametrize("net", [LOGGP, MEASURED])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ring_takes_its_steps(net: LogGP | Piecewise, n: int) -> None:
    took_s = simulated_s(net, n, ring, 3 * n)
    assert took_s == close_to(2 * (n - 1) * net.message_s(24))


@pytest.mark.parametrize("net", [LOGGP, MEASURED, AlphaBeta(), Fabric()])
def test_a_library_collective_takes_the_steps_of_its_algorithm(net: Network) -> None:
    wires = net.wires(4)
    hop = wires.message(0, 1, 4000, 0)[1]
    assert wires.collective("all_reduce", 4, 16000) == pytest.approx(6 * hop, rel=1e-6)
    assert wires.collective("broadcast", 4, 4000) == pytest.approx(2 * hop, rel=1e-6)
    assert wires.collective("all_reduce", 1, 16000) == 0


@pytest.mark.parametrize("net", [LOGGP, MEASURED, AlphaBeta(), Fabric()])
def test_links_tell_how_long_they_were_busy(net: Network) -> None:
    wires = net.wires(4)
    assert isinstance(wires, Metered)
    assert wires.usage() == {}
    wires.message(0, 1, 1000, 0)
    once = wires.usage()
    assert len(once) == 2  # the way out of one and into the other
    assert all(ps > 0 for ps in once.values())
    wires.message(0, 1, 1000, 0)
    assert wires.usage() == {name: 2 * ps for name, ps in once.items()}


# ── what cannot be ──────────────────────────────────────────────────────────────────


IMPOSSIBLE: list[tuple[Any, dict[str, float]]] = [
    (LogGP, {"latency_s": -1}),
    (LogGP, {"gap_per_byte_s": math.inf}),
    (LogGP, {"overhead_s": math.nan}),
    (Fabric, {"node_size": 0}),
    (Fabric, {"nics": 1.5}),
    (Fabric, {"nodes_per_leaf": -2}),
    (Fabric, {"nic_alpha_s": math.nan}),
    (Fabric, {"nic_bytes_per_s": 0}),
    (Fabric, {"oversub": 0.5}),
    (Fabric, {"oversub": math.inf}),
]
Rows = tuple[tuple[float, float], ...]
TABLES: list[tuple[Rows, str]] = [
    ((), ""),
    (((8, 1.0), (8, 2.0)), r"\b8\b.*\b8\b"),
    (((9, 1.0), (8, 2.0)), r"\b8\b.*\b9\b"),
    (((-1, 1.0),), "-1 bytes"),
    (((0.5, 1.0),), r"\b0\.5 bytes"),
    (((math.nan, 1.0),), "nan bytes"),
    (((1, -1.0),), r"-1\.0 seconds.*\b1 bytes"),
    (((1, math.nan),), r"nan seconds.*\b1 bytes"),
    (((1, math.inf),), r"inf seconds.*\b1 bytes"),
]


def test_networks_that_cannot_be(golden: Golden) -> None:
    told = []
    for kind, facts in IMPOSSIBLE:
        told.append(refusal(ValueError, kind, **facts))
        ((name, value),) = facts.items()
        assert re.search(rf"\b{name}\b.* {value}", told[-1])
    for table, named in TABLES:
        told.append(refusal(ValueError, Piecewise, table=table))
        assert re.search(named, told[-1])
    golden("sim/networks-that-cannot-be", "\n".join(told))


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "here.json", measured_on="loopback")
    assert Piecewise.load(tmp_path / "here.json") == MEASURED
    assert json.loads((tmp_path / "here.json").read_text())["measured_on"] == "loopback"


@pytest.mark.parametrize("net", [LOGGP, MEASURED, AlphaBeta(), Fabric(nics=3)])
def test_a_network_travels_as_plain_data(net: Network) -> None:
    assert from_data(json.loads(json.dumps(as_data(net)))) == net


@pytest.mark.parametrize("data", [{}, {"kind": "Magic"}])
def test_data_of_no_network(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\bAlphaBeta\b.*\bFabric\b"):
        from_data(data)


def test_a_network_of_ones_own_stays_here() -> None:
    class Mine(AlphaBeta):
        pass

    with pytest.raises(ValueError, match=r"\bMine\b"):
        as_data(Mine())


FORMAT = '{"format": "distlab link table 1", '


BROKEN = [
    ("", "JSON"),
    ('{"size', "JSON"),
    ("[1, 2]", '"format"'),
    ('{"format": "distlab link table 9"}', '"format"'),
    (FORMAT + '"seconds": [1]}', r"\bsize_bytes\b.*\bseconds\b"),
    (FORMAT + '"size_bytes": [1], "seconds": [1, 2]}', r"\bsize_bytes\b"),
    (FORMAT + '"size_bytes": [true], "seconds": [1]}', r"\bsize_bytes\b"),
    (FORMAT + '"size_bytes": ["1"], "seconds": [1]}', r"\bsize_bytes\b"),
    (FORMAT + '"size_bytes": "1", "seconds": "1"}', r"\bsize_bytes\b"),
    (FORMAT + '"size_bytes": [], "seconds": []}', ""),
    (FORMAT + '"size_bytes": [1], "seconds": [NaN]}', "nan seconds"),
    (FORMAT + '"size_bytes": [1e999], "seconds": [1]}', "inf bytes"),
]


def test_a_broken_file_is_named_in_one_line(tmp_path: Path, golden: Golden) -> None:
    path, told = tmp_path / "broken.json", []
    for text, named in BROKEN:
        path.write_text(text)
        told.append(refusal(ValueError, Piecewise.load, path))
        assert told[-1].startswith(str(path))
        assert re.search(named, told[-1]), text
        assert "\n" not in told[-1]
    golden("sim/broken-link-tables", "\n".join(told))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"\bnone\.json\b.*{ABSENT}"):
        Piecewise.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match=rf"\ba\.json\b.*{ABSENT}"):
        MEASURED.save(tmp_path / "none" / "a.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"\bJSON\b"):
        Piecewise.load(tmp_path / "bytes.json")


def test_time_is_a_whole_number_of_picoseconds() -> None:
    nets = (LOGGP, MEASURED, AlphaBeta(bytes_per_s=3e9), Fabric(nic_bytes_per_s=3e9))
    for net in nets:
        booked = net.wires(16).message(0, 15, 1001, 17)
        assert all(isinstance(moment, int) for moment in booked)
    assert picoseconds(0.5e-12) in (0, 1)


@pytest.mark.parametrize("seed", range(8))
def test_messages_of_one_instant_take_what_each_takes_alone(seed: int) -> None:
    chance = random.Random(seed)
    net = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)
    together, alone = net.wires(4), net.wires(4)
    assert isinstance(together, Ports)
    assert isinstance(alone, Ports)
    ring = [Channel(r, (r + 1) % 4, 0) for r in range(4)]
    others = [Channel(r, (r + 2) % 4, 0) for r in range(4)]
    now_ps = 0
    for _ in range(60):
        channels = chance.choice([ring, ring[::-1], ring[:3], ring + others, ring * 2])
        sizes = [1000] * len(channels)
        if chance.random() < 0.2:
            sizes[-1] = 5000
        receives = [
            SimpleNamespace(channel=channel, other=SimpleNamespace(num_bytes=size))
            for channel, size in zip(channels, sizes, strict=True)
        ]
        each = [
            alone.message(channel.src, channel.dst, size, now_ps)[1]
            for channel, size in zip(channels, sizes, strict=True)
        ]
        assert together.messages(receives, now_ps) == each
        if chance.random() < 0.2:
            one = (chance.randrange(4), chance.randrange(4), 700, now_ps)
            assert together.message(*one) == alone.message(*one)
        now_ps = chance.choice([now_ps + US // 4, max(each)])
    assert together.usage() == alone.usage()
