"""Networks and faults on one line: what is understood, and what is said otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.sim import AlphaBeta, Network
from distlab.sim.faults import Faults
from distlab.sim.net import quantities, spec
from distlab.sim.net.fabric import Fabric
from distlab.sim.net.loggp import LogGP
from distlab.sim.net.piecewise import Piecewise
from distlab.sim.net.presets import PRESETS
from distlab.sim.net.spec import parse_faults, parse_net
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (quantities.seconds, "10us", 10e-6),
        (quantities.seconds, "10 µs", 10e-6),
        (quantities.seconds, "0.08ns", 0.08e-9),
        (quantities.seconds, "0.2s", 0.2),
        (quantities.seconds, "1e-3ms", 1e-6),
        (quantities.seconds, "0", 0.0),
        (quantities.num_bytes, "4MiB", 4 * 1024**2),
        (quantities.num_bytes, "4MB", 4_000_000),
        (quantities.num_bytes, "0.5kB", 500),
        (quantities.num_bytes, "64", 64),
        (quantities.bytes_per_s, "100Gbit", 12.5e9),
        (quantities.bytes_per_s, "100Gbit/s", 12.5e9),
        (quantities.bytes_per_s, "12.5GB/s", 12.5e9),
        (quantities.bytes_per_s, "1MiB/s", 1024.0**2),
        (quantities.bytes_per_s, "8bit/s", 1.0),
        (quantities.bytes_per_s, "inf", float("inf")),
        (quantities.share, "1%", 0.01),
        (quantities.share, "0.25", 0.25),
        (quantities.share, "100%", 1.0),
        (quantities.factor, "2.5", 2.5),
        (quantities.whole, "12", 12),
    ],
)
def test_quantities(read: Any, text: str, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-15)


NO_QUANTITIES: list[tuple[Callable[[str], float], str, str]] = [
    (quantities.seconds, "10", "us"),
    (quantities.seconds, "fast", "10us"),
    (quantities.seconds, "", "10us"),
    (quantities.seconds, "-1us", ""),
    (quantities.seconds, "1e999s", ""),
    (quantities.seconds, "nan", "10us"),
    (quantities.seconds, "10uS", "us"),
    (quantities.seconds, "1m", "ms"),
    (quantities.num_bytes, "4Mb", "MB"),
    (quantities.num_bytes, "0.1B", "0.1"),
    (quantities.bytes_per_s, "12GB", "12GB/s"),
    (quantities.bytes_per_s, "100Gb", "Gbit"),
    (quantities.bytes_per_s, "0Gbit", "0"),
    (quantities.bytes_per_s, "100", "Gbit"),
    (quantities.share, "101%", "100%"),
    (quantities.share, "1.5", "100%"),
    (quantities.share, "1x", "%"),
    (quantities.factor, "2x", "2.5"),
    (quantities.whole, "2.5", ""),
    (quantities.whole, "-1", ""),
    (quantities.whole, "٣", ""),
    (quantities.whole, "9" * 5000, ""),
]


def test_what_is_no_quantity(golden: Golden) -> None:
    told = []
    for read, text, named in NO_QUANTITIES:
        message = refusal(ValueError, read, text)
        told.append(message)
        assert f'"{text[:9]}' in message
        assert named in message.replace(f'"{text}"', ""), text
    golden("sim/no-quantities", "\n".join(told[:-1]))


FABRIC = Fabric(
    node_size=8, nics=1, nic_bytes_per_s=25e9, oversub=4.0, intra_node_bytes_per_s=450e9
)


@pytest.mark.parametrize(
    ("text", "net"),
    [
        ("alpha=10us,bw=100Gbit", AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)),
        (" bw = 1GB/s ", AlphaBeta(bytes_per_s=1e9)),
        ("alpha=0,bw=inf", AlphaBeta(alpha_s=0.0, bytes_per_s=float("inf"))),
        ("loggp:", LogGP()),
        (
            "loggp:L=6us,o=1us,g=2us,G=0.08ns",
            LogGP(latency_s=6e-6, overhead_s=1e-6, gap_s=2e-6, gap_per_byte_s=0.08e-9),
        ),
        ("nvlink:8,nic=1x200Gbit,oversub=4", FABRIC),
        ("nvlink:8,nic=200Gbit,oversub=4", FABRIC),
        (
            "nvlink:4,alpha=1us,bw=300GB/s,nic=4x50GB/s,nic-alpha=7us,leaf=2",
            Fabric(
                node_size=4,
                intra_node_alpha_s=1e-6,
                intra_node_bytes_per_s=300e9,
                nics=4,
                nic_bytes_per_s=50e9,
                nic_alpha_s=7e-6,
                nodes_per_leaf=2,
            ),
        ),
        ("nvlink", PRESETS["nvlink"]),
        ("laptop,alpha=1ms", AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)),
        (
            "dgx-h100,oversub=2",
            Fabric(nics=8, nic_alpha_s=5e-6, nic_bytes_per_s=50e9, oversub=2.0),
        ),
    ],
)
def test_networks(text: str, net: Network) -> None:
    assert parse_net(text) == net


@pytest.mark.parametrize("name", PRESETS)
def test_every_name_is_a_network_and_documented(name: str) -> None:
    assert parse_net(name) is not None
    assert parse_net(name).wires(16).message(0, 15, 1000, 0)[1] > 0
    assert spec.__doc__ is not None
    assert name in spec.__doc__


def test_what_the_grammar_shows_is_understood(tmp_path: Path) -> None:
    table = tmp_path / "laptop.json"
    Piecewise(table=((1, 1e-6), (9, 2e-6))).save(table)
    assert spec.__doc__ is not None
    nets, faults = spec.__doc__.split("Faults (")
    shown = re.findall(r"^    (\S+(?:=|:[a-zL8]|100g)\S*)  +\S", nets, re.MULTILINE)
    assert len(shown) == 6
    for text in shown:
        parse_net(text.replace("laptop.json", str(table)))
    shown = re.findall(r"^    ((?:[a-z]+=\S+ *)+)(?:  |$)", faults, re.MULTILINE)
    assert len(shown) == 9
    for text in " ".join(shown).split():
        parse_faults(text)


def test_a_table(tmp_path: Path) -> None:
    table = Piecewise(table=((1, 1e-6), (9, 2e-6)))
    table.save(tmp_path / "a,b=c.json")
    assert parse_net(f"table:{tmp_path / 'a,b=c.json'}") == table


NO_NETWORKS = [
    ("", "ethernet-10g"),
    ("etherent-10g", "ethernet-10g"),
    ("nvlnk:8", "nvlink:"),
    ("quantum", "laptop"),
    ("alpha=10us,bandwidth=1", '"bandwidth"'),
    ("alpah=10us", '"alpah".*alpha'),
    ("alpha=10us,alpha=5us", "alpha"),
    ("alpha=10us,", ""),
    ("alpha=10us,,bw=1GB/s", ""),
    ("alpha=,bw=1GB/s", '"alpha="'),
    ("alpha=10us,bw", '"bw"'),
    ("alpha=10", 'alpha: "10"'),
    ("bw=100Gb", 'bw: "100Gb"'),
    ("loggp:l=5us", '"l".*L o g G'),
    ("nvlink:eight", '"eight"'),
    ("nvlink:0", r"node_size\b.* 0"),
    ("nvlink:8,nic=xfast", 'nic: "fast"'),
    ("nvlink:8,nic=0x1GB/s", r"nics\b.* 0"),
    ("nvlink:8,oversub=0.5", r"oversub\b.* 0\.5"),
    ("dgx-h100,L=1us", '"L"'),
    ("table:", "laptop.json"),
    ("table:none.json", r"none\.json"),
]


def test_a_malformed_network_is_refused_in_one_line(golden: Golden) -> None:
    told = []
    for text, named in NO_NETWORKS:
        told.append(refusal(ValueError, parse_net, text))
        before, quoted, after = told[-1].partition(f'"{text}": ')
        assert (before, quoted) == ("the network ", f'"{text}": ')
        assert re.search(named, after), text
        assert "\n" not in after
    golden("sim/malformed-networks", "\n".join(told))


# ── faults ──────────────────────────────────────────────────────────────────────────


def test_faults() -> None:
    text = (
        "straggler=3:2.5,kill=5@0.2s,loss=1%,partition=0-3@0.1s-0.2s,late=7@1s,"
        "straggler=4:2,duplicate=0.5%,seed=9"
    )
    assert parse_faults(text) == Faults(
        straggler={3: 2.5, 4: 2.0},
        kill={5: 0.2},
        loss=0.01,
        duplicate=0.005,
        partitions=(((0, 1, 2, 3), 0.1, 0.2),),
        late={7: 1.0},
        seed=9,
    )


def test_faults_of_nodes_and_several_at_once() -> None:
    text = (
        "restart=0@0.2s-0.5s,restart=0@1s-2s,restart=store@0-1ms,torn=ps@1s-2s,"
        "freeze=1@0.2s-0.5s,kill=store@3s,partition=0+store@0-1s,partition=1@0-1s"
    )
    assert parse_faults(text) == Faults(
        restart=((0, 0.2, 0.5), (0, 1.0, 2.0), ("store", 0.0, 1e-3)),
        torn=(("ps", 1.0, 2.0),),
        freeze=((1, 0.2, 0.5),),
        kill={"store": 3.0},
        partitions=(((0, "store"), 0.0, 1.0), ((1,), 0.0, 1.0)),
    )


def test_ranks_of_a_partition() -> None:
    assert parse_faults("partition=0+2-4+9@0-1ms") == Faults(
        partitions=(((0, 2, 3, 4, 9), 0.0, 1e-3),)
    )


NO_FAULTS = [
    ("", ""),
    ("stragler=3:2", '"stragler".*straggler'),
    ("quake=1", '"quake".*straggler kill restart torn'),
    ("kill", '"kill".*kill='),
    ("kill=5", 'kill: "5".*kill=5@0.2s'),
    ("kill=5e1@1s", 'kill: "5e1"'),
    ("kill=@1s", 'kill: ""'),
    ("kill=store@1s,kill=store@2s", r"kill\b.*\bstore"),
    ("restart=0", 'restart: "0".*RANK@FROM-TO'),
    ("restart=0@0.2s", 'restart: "0@0.2s".*RANK@FROM-TO'),
    ("restart=0@0.2-0.5s", 'restart: "0.2"'),
    ("restart=0@0.2s-", 'restart: ""'),
    ("restart=0@0.5s-0.2s", 'restart: "0.5s-0.2s"'),
    ("restart=-1@1s-2s", 'restart: "-1"'),
    ("restart=0-3@1s-2s", 'restart: "0-3"'),
    ("restart=0@1s-3s,restart=0@2s-4s", r"restart\b.*rank 0\b.* 2 s"),
    ("restart=0@1s-3s,torn=0@2s-4s", r"torn\b.*rank 0\b.* 2 s"),
    ("restart=3@1s-2s,late=3@1s", r"restart\b.*rank 3\b.* 1.0 s"),
    ("freeze=1", 'freeze: "1".*RANK@FROM-TO'),
    ("freeze=ps@1s-3s,freeze=ps@2s-9s", 'freeze.*"ps".* 2 s'),
    ("torn=1@1s", 'torn: "1@1s".*RANK@FROM-TO'),
    ("late=store@1s", 'late: "store"'),
    ("partition=0+@0-1s", 'partition: ""'),
    ("kill=5@1", 'kill: "1"'),
    ("late=1@-1s", 'late: "-1s"'),
    ("straggler=3", 'straggler: "3".*straggler=3:2.5'),
    ("straggler=3:2x", 'straggler: "2x"'),
    ("straggler=3:2,straggler=3:4", r"straggler\b.*rank 3"),
    ("loss=1%,loss=2%", "loss"),
    ("loss=200%", 'loss: "200%"'),
    ("seed=x", 'seed: "x"'),
    ("partition=0-3", 'partition: "0-3".*RANKS@FROM-TO'),
    ("partition=0-3@1s", 'partition: "0-3@1s".*RANKS@FROM-TO'),
    ("partition=3-0@0-1s", 'partition: "3-0"'),
    ("partition=0-9999999999@0-1s", 'partition: "0-9999999999"'),
    ("partition=0@2s-1s", 'partition: "2s-1s"'),
]


def test_malformed_faults_are_refused_in_one_line(golden: Golden) -> None:
    told = []
    for text, named in NO_FAULTS:
        told.append(refusal(ValueError, parse_faults, text))
        before, quoted, after = told[-1].partition(f'"{text}": ')
        assert (before, quoted) == ("the faults ", f'"{text}": ')
        assert re.search(named, after), text
        assert "\n" not in after
    golden("sim/malformed-faults", "\n".join(told))
