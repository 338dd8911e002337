"""Checks of task 3.8, `topology.choose`: never much slower than the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from distlab.grading.checks.topology.forms import NAMES, NodesModel
from distlab.grading.clause import clauses
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.sim import AlphaBeta

SIZES = (0, *(4**power for power in range(3, 16)))  # 64 bytes … 1 GiB
SLOWER = 1.10
LOOPBACK = AlphaBeta(alpha_s=30e-6, bytes_per_s=1e9)
ETHERNET = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
INFINIBAND = AlphaBeta(alpha_s=5e-6, bytes_per_s=50e9)
NVLINK = AlphaBeta(alpha_s=3e-6, bytes_per_s=450e9)
NOBODYS = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e8)  # intra-node links that do not exist
_TABLE = 4  # lines of evidence


def _flat(name: str, link: AlphaBeta, n: int) -> NodesModel:
    return NodesModel(name, n, 1, NOBODYS, link, link.bytes_per_s)


FLAT = tuple(
    _flat(name, link, n)
    for name, link in (
        ("loopback", LOOPBACK),
        ("100 Gbit Ethernet", ETHERNET),
        ("NVLink", NVLINK),
    )
    for n in (1, 2, 3, 5, 8, 12, 64, 100, 1024)
)
ON_NODES = tuple(
    NodesModel(name, k * p, k, intra_node, inter_node, uplink)
    for p in (1, 2, 8, 128)
    for name, k, intra_node, inter_node, uplink in (
        ("one NIC per rank", 8, NVLINK, INFINIBAND, 8 * 50e9),
        ("one NIC per node", 8, NVLINK, INFINIBAND, 50e9),
        ("NICs 4:1 oversubscribed", 8, NVLINK, INFINIBAND, 2 * 50e9),
        ("a NIC wider than its ranks' links", 4, NVLINK, ETHERNET, 16 * 12.5e9),
        ("one slow NIC", 4, INFINIBAND, LOOPBACK, 1e9),
        ("links inside a node no faster", 2, ETHERNET, ETHERNET, 12.5e9),
    )
)


def choose_all(context: RankContext, unit: ModuleType, seed: int) -> list[list[str]]:
    """The choice in every setting, size by size."""
    found = []
    for nodes in (*FLAT, *ON_NODES):
        intra_node, inter_node = (
            unit.Link(link.alpha_s, link.bytes_per_s)
            for link in (nodes.intra_node, nodes.inter_node)
        )
        cluster = unit.Cluster(
            nodes.n, nodes.k, intra_node, inter_node, nodes.uplink_bytes_per_s
        )
        row = []
        for size in SIZES:
            with in_call(f"choose({cluster}, {size})"):
                row.append(_read(unit.choose(cluster, size)))
        found.append(row)
    return found


def _read(chosen: Any) -> str:
    return chosen if isinstance(chosen, str) else f"{chosen!r:.40}"


# ── the judge ───────────────────────────────────────────────────────────────────────


def _judge(clause_id: str, runs: Runs) -> str:
    kinds = FLAT if clause_id == "C1" else ON_NODES
    told = worked_out(runs, choose_all).values[0]
    every = (*FLAT, *ON_NODES)
    rows = [told[every.index(nodes)] for nodes in kinds]
    slow: list[tuple[float, NodesModel, int, str]] = []
    for nodes, row in zip(kinds, rows, strict=True):
        for size, name in zip(SIZES, row, strict=True):
            if name not in NAMES:
                shown = name if name.startswith(("(", "None")) else repr(name)
                raise NotYetError(
                    f"for {_size(size)} on {_where(nodes)}, `choose` returned {shown}, "
                    "expected the name of an algorithm",
                    rule=f"return one of {', '.join(NAMES)}",
                )
            seconds = nodes.seconds(size)
            best = min(seconds.values())
            if best and seconds[name] > SLOWER * best:
                slow.append((seconds[name] / best, nodes, size, name))
    if slow:
        raise _slow(kinds, rows, slow)
    used = [name for name in NAMES if any(name in row for row in rows)]
    return f"{len(kinds) * len(SIZES)} settings: {', '.join(used)}"


def _where(nodes: NodesModel) -> str:
    """`64 ranks (one NIC per node)`."""
    return f"{nodes.n} rank{'s' * (nodes.n > 1)} ({nodes.name})"


def _slow(
    kinds: Sequence[NodesModel],
    rows: list[list[str]],
    slow: list[tuple[float, NodesModel, int, str]],
) -> NotYetError:
    slow.sort(key=lambda entry: -entry[0])
    factor, nodes, size, name = slow[0]
    seconds = nodes.seconds(size)
    best = min(seconds, key=lambda other: seconds[other])
    slug, words = _mistake(kinds, rows)
    return NotYetError(
        f"for {_size(size)} on {_where(nodes)}, `choose` returned {name!r}, expected "
        f"{best!r}, which is {factor:.3g} times as fast{words}",
        slug=slug,
        evidence=tuple(_line(*entry) for entry in slow[:_TABLE]),
        rule="estimate the time of each algorithm there, and return the smallest",
    )


def _line(factor: float, nodes: NodesModel, size: int, name: str) -> Evidence:
    seconds = nodes.seconds(size)
    best = min(seconds, key=lambda other: seconds[other])
    return Evidence(
        NOBODY,
        "slow",
        f"{nodes.setting}, {_size(size)}: {name} {1e6 * seconds[name]:,.0f} µs, "
        f"{best} {1e6 * seconds[best]:,.0f} µs",
    )


def _size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes >> power} {unit}"
    return f"{num_bytes} bytes"


def _mistake(kinds: Sequence[NodesModel], rows: list[list[str]]) -> tuple[str, str]:
    """Slug and words, if all the answers are those of a known wrong way."""
    if len({name for row in rows for name in row}) == 1:
        return "one-for-all-sizes", ": the choice is the same everywhere"
    if all(len(set(row)) == 1 for row in rows):
        return "one-for-all-sizes", ": the choice never depends on the size"
    if kinds is FLAT:
        return "", ""
    if _are(kinds, rows, _as_if_flat):
        return "nodes-forgotten", ": the choices ignore the nodes"
    if _are(kinds, rows, lambda nodes, size: nodes.seconds(size, flows=1)):
        return (
            "uplink-not-shared",
            ": the ranks of a node share one uplink",
        )
    return "", ""


def _as_if_flat(nodes: NodesModel, size: int) -> dict[str, float]:
    flat = _flat(nodes.name, nodes.inter_node, nodes.n).seconds(size)
    del flat["hierarchical"]
    return flat


def _are(
    kinds: Sequence[NodesModel],
    rows: list[list[str]],
    model: Callable[[NodesModel, int], dict[str, float]],
) -> bool:
    """Whether each answer is a best one of this model."""
    for nodes, row in zip(kinds, rows, strict=True):
        for size, name in zip(SIZES, row, strict=True):
            seconds = model(nodes, size)
            if seconds.get(name, 1e9) > min(seconds.values()) * (1 + 1e-9):
                return False
    return True


clauses(
    "topology.choose", ("C1", "C2"), _judge, worlds=(1,), runs=[on_ranks(choose_all)]
)
