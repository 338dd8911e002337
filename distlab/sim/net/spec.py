"""Networks and faults on one line, as they are typed into a shell.

A network (`--net`) is a name, a kind or its parts; parts are joined by commas:

    ethernet-100g                          a name from the list below
    dgx-h100,oversub=4                     a name, and what is different
    alpha=10us,bw=100Gbit                  latency and bandwidth, equal for all pairs
    loggp:L=5us,o=1us,g=2us,G=0.08ns       the four parameters of LogGP; G is per byte
    nvlink:8,nic=1x200Gbit,oversub=4       nodes of 8 GPUs, their NICs, the switches
    table:laptop.json                      what `distlab calibrate` measured

    kind      its parts
    (none)    alpha   bw
    loggp:    L   o   g   G
    nvlink:N  alpha  bw             intra-node
              nic=COUNTxSPEED       the NICs of a node; COUNT may be left out
              nic-alpha             inter-node
              leaf=N                nodes on one leaf switch
              oversub=N             bandwidth into a leaf ÷ bandwidth of its uplinks
    names     laptop ethernet-10g ethernet-100g infiniband-ndr nvlink dgx-h100

Faults (`--fault`); a part that is about ranks can be repeated:

    straggler=3:2.5            rank 3 and its messages take 2.5 times as long
    kill=5@0.2s                rank 5 dies at 0.2 s
    restart=0@0.2s-0.5s        rank 0 dies at 0.2 s and starts again at 0.5 s; its disk
                               has what was synced
    torn=0@0.2s-0.5s           the same, but in one of its first four operations on its
                               disk after 0.2 s
    freeze=1@0.2s-0.5s         rank 1 does nothing for that time
    late=7@1s                  rank 7 starts at 1 s
    loss=1%  duplicate=1%      of the messages, drawn at random
    partition=0-3@0.1s-0.2s    ranks 0 to 3 are cut off from the others for that time;
                               0+2+5 are single ranks
    seed=7                     of the drawing

For a rank of kill, restart, torn, freeze and partition may stand `store`, the node that
keeps the Store, or a service of the run by its name: kill=store@1s.

Units are those of `quantities`: 10us, 4MiB, 100Gbit, 12.5GB/s, 1%.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from distlab.sim.faults import Faults, Node, Outage, Partition, node_words
from distlab.sim.net import quantities
from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import AlphaBeta, Network
from distlab.sim.net.loggp import LogGP
from distlab.sim.net.piecewise import Piecewise
from distlab.sim.net.presets import PRESETS

Reader = Callable[[str], Any]
"""Converts the text after `name=` to a value, or for a network to fields of its
class."""


def _field(name: str, read: Callable[[str], Any]) -> Reader:
    return lambda text: {name: read(text)}


def _nics(text: str) -> dict[str, Any]:
    """Read `8x400Gbit`, or `400Gbit` for one NIC."""
    count, times, speed = text.partition("x")
    if not times:
        count, speed = "1", text
    facts = {"nic_bytes_per_s": quantities.bytes_per_s(speed)}
    return {"nics": quantities.whole(count), **facts}


_ALPHA_BETA: dict[str, Reader] = {
    "alpha": _field("alpha_s", quantities.seconds),
    "bw": _field("bytes_per_s", quantities.bytes_per_s),
}
_LOGGP: dict[str, Reader] = {
    "L": _field("latency_s", quantities.seconds),
    "o": _field("overhead_s", quantities.seconds),
    "g": _field("gap_s", quantities.seconds),
    "G": _field("gap_per_byte_s", quantities.seconds),
}
_FABRIC: dict[str, Reader] = {
    "alpha": _field("intra_node_alpha_s", quantities.seconds),
    "bw": _field("intra_node_bytes_per_s", quantities.bytes_per_s),
    "nic": _nics,
    "nic-alpha": _field("nic_alpha_s", quantities.seconds),
    "leaf": _field("nodes_per_leaf", quantities.whole),
    "oversub": _field("oversub", quantities.factor),
}
_KINDS = ("loggp:", "nvlink:N", "table:FILE")


def parse_net(text: str) -> Network:
    """Return the network that `text` describes; the module documents the grammar.

    Raises:
        ValueError: the message says what is wrong and where, and what is known.
    """
    try:
        return _net(text.strip())
    except ValueError as error:
        raise ValueError(f'the network "{text}": {error}') from None


def _net(text: str) -> Network:
    kind, colon, rest = text.partition(":")
    if kind == "table" and colon:
        if not rest:
            raise ValueError("the file is missing, as in table:laptop.json")
        return Piecewise.load(rest)
    first, *parts = text.split(",")
    first = first.strip()
    if first in PRESETS:
        return _changed(PRESETS[first], parts)
    if kind == "loggp" and colon:
        return _changed(LogGP(), rest.split(",") if rest else [])
    if kind == "nvlink" and colon:
        size = quantities.whole(first.partition(":")[2])
        return _changed(Fabric(node_size=size), parts)
    if "=" in first:
        return _changed(AlphaBeta(), text.split(","))
    known = [*PRESETS, *_KINDS]
    near = quantities.nearest(first, [*PRESETS, "loggp:", "nvlink:", "table:"])
    if not text:
        raise ValueError(f"it is empty; known are {', '.join(known)} and alpha=…,bw=…")
    raise ValueError(
        f'there is no network "{first}"{near}; '
        f"known are {', '.join(known)} and alpha=…,bw=…"
    )


def _changed(net: Network, parts: Iterable[str]) -> Network:
    """Return `net`, changed as `parts` say."""
    if isinstance(net, LogGP):
        return replace(net, **_facts(parts, _LOGGP))
    if isinstance(net, Fabric):
        return replace(net, **_facts(parts, _FABRIC))
    assert isinstance(net, AlphaBeta), "the presets are of these kinds"
    return replace(net, **_facts(parts, _ALPHA_BETA))


def _facts(parts: Iterable[str], readers: dict[str, Reader]) -> dict[str, Any]:
    """Return all parts, and refuse one that is given twice."""
    facts: dict[str, Any] = {}
    seen: set[str] = set()
    for name, value in map(_split, parts):
        if name in seen:
            raise ValueError(f"{name} is given twice")
        seen.add(name)
        facts.update(_read(name, value, readers))
    return facts


def _split(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not part.strip():
        raise ValueError("a part between two commas, or at an end, is empty")
    if not equals or not value.strip():
        raise ValueError(f'"{part.strip()}" has no value: write {name.strip()}=…')
    return name.strip(), value.strip()


def _read(name: str, value: str, readers: dict[str, Reader]) -> Any:
    if name not in readers:
        near = quantities.nearest(name, readers)
        known = " ".join(readers)
        raise ValueError(f'there is no part "{name}" here{near}; known are {known}')
    try:
        return readers[name](value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# ── faults ──────────────────────────────────────────────────────────────────────────


def parse_faults(text: str) -> Faults:
    """Return the faults that `text` describes; the module documents the grammar.

    Raises:
        ValueError: the message says what is wrong and where, and what is known.
    """
    try:
        return Faults(**_fault_facts(text))
    except ValueError as error:
        raise ValueError(f'the faults "{text}": {error}') from None


def _fault_facts(text: str) -> dict[str, Any]:
    """Return the keyword arguments, with those for single nodes collected."""
    facts: dict[str, Any] = {}
    for name, value in map(_split, text.split(",")):
        if name in _REPEATED:
            field = _REPEATED[name]
            facts[field] = (*facts.get(field, ()), _read(name, value, _FAULTS))
            continue
        if name not in _BY_RANK:
            if name in facts:
                raise ValueError(f"{name} is given twice")
            facts[name] = _read(name, value, _FAULTS)
            continue
        rank, what = _read(name, value, _FAULTS)
        ranks = facts.setdefault(name, {})
        if rank in ranks:
            raise ValueError(f"{name} is given twice for {node_words(rank)}")
        ranks[rank] = what
    return facts


def _and(
    who: Callable[[str], Node], sign: str, read: Callable[[str], float], example: str
) -> Reader:
    """Read two values: `3:2.5` → (3, 2.5)."""

    def parse(text: str) -> tuple[Node, float]:
        node, found, value = text.partition(sign)
        if not found:
            raise ValueError(f'"{text}" has no {sign}, as in {example}')
        return who(node), read(value)

    return parse


def _node(text: str) -> Node:
    """Read `3`, or the name of a node that isn't a rank."""
    name = text.strip()
    return name if name.isidentifier() else quantities.whole(name)


def _outage(example: str) -> Reader:
    """Read an outage: `0@0.2s-0.5s` → (0, 0.2, 0.5)."""

    def parse(text: str) -> Outage:
        node, at, times = text.partition("@")
        if not (at and "-" in times):
            raise ValueError(f'"{text}" is not RANK@FROM-TO, as in {example}')
        return _node(node), *_span(times)

    return parse


def _span(times: str) -> tuple[float, float]:
    """Read two times: `0.1s-0.2s` → (0.1, 0.2)."""
    start, _, end = times.partition("-")
    from_s, to_s = quantities.seconds(start), quantities.seconds(end)
    if to_s <= from_s:
        raise ValueError(f'"{times}" ends before it has begun')
    return from_s, to_s


def _nodes(text: str) -> tuple[Node, ...]:
    """Read nodes: `0-3+8+store` → 0, 1, 2, 3, 8, "store"."""
    found: set[int] = set()
    names: list[str] = []
    for part in text.split("+"):
        if part.strip().isidentifier():
            names.append(part.strip())
            continue
        first, dash, last = part.partition("-")
        low = quantities.whole(first)
        high = quantities.whole(last) if dash else low
        if not low <= high < _MANY:
            raise ValueError(f'"{part}" is no range of ranks, such as 0-3')
        found.update(range(low, high + 1))
    return *sorted(found), *dict.fromkeys(names)


def _partition(text: str) -> Partition:
    """Read a partition: `0-3@0.1s-0.2s` → ((0, 1, 2, 3), 0.1, 0.2)."""
    nodes, at, times = text.partition("@")
    if not (at and "-" in times):
        raise ValueError(f'"{text}" is not RANKS@FROM-TO, as in 0-3@0.1s-0.2s')
    from_s, to_s = _span(times)
    return _nodes(nodes), from_s, to_s


_MANY = 100_000  # more ranks than anyone simulates; keeps 0-9999999999 from being built
_FAULTS: dict[str, Reader] = {
    "straggler": _and(quantities.whole, ":", quantities.factor, "straggler=3:2.5"),
    "kill": _and(_node, "@", quantities.seconds, "kill=5@0.2s"),
    "restart": _outage("restart=0@0.2s-0.5s"),
    "torn": _outage("torn=0@0.2s-0.5s"),
    "freeze": _outage("freeze=1@0.2s-0.5s"),
    "late": _and(quantities.whole, "@", quantities.seconds, "late=7@1s"),
    "loss": quantities.share,
    "duplicate": quantities.share,
    "partition": _partition,
    "seed": quantities.whole,
}
_BY_RANK = ("straggler", "kill", "late")
_REPEATED = {
    **{name: name for name in ("restart", "torn", "freeze")},
    "partition": "partitions",
}
