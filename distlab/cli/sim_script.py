"""`distlab sim -n 256 script.py`: what a script would do on that many ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from distlab.cli.screen import show, show_json, wrapped
from distlab.cli.sim_report import size_words
from distlab.cli.trace import open_page
from distlab.grading import FAILED
from distlab.paths import shown
from distlab.sim.net.quantities import time_words

if TYPE_CHECKING:
    from distlab.sim import SimRun
    from distlab.sim.torch.script import Script

Row = dict[str, Any]
_COLUMN = 12


def sim_script(
    script: Script,
    *,
    world_size: int,
    nodes: str = "",
    net: str = "ethernet-100g",
    fault: str = "",
    flops: float = 1e13,
    seed: int = 0,
    all_output: bool = False,
    own: tuple[str, ...] = (),
    device: str = "cuda",
    fake: bool = False,
    play: str = "",
    html: str = "",
    perfetto: str = "",
    chakra: str = "",
    open_it: bool = False,
    as_json: bool = False,
) -> int:
    """Simulate a script; exit code 1 if a rank failed or the ranks hung.

    Raises:
        ValueError: a malformed network, fault, number of nodes or list of ranks, or no
            such script.
    """
    from distlab.sim import Faults
    from distlab.sim.net.fabric import Fabric
    from distlab.sim.net.spec import parse_faults, parse_net
    from distlab.sim.torch.rank import Rank
    from distlab.sim.torch.script import run_script

    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device is {device}; choose cuda or cpu")
    network = parse_net(net)
    node_size = network.node_size if isinstance(network, Fabric) else 0
    world_size, per_node = placed(world_size, nodes, node_size)
    if nodes and isinstance(network, Fabric):
        network = replace(network, node_size=per_node)
    faults = parse_faults(fault) if fault else Faults()
    faults.check(world_size)
    played = _played(play, world_size, per_node) if fake or play else None
    output = Output(sys.stderr if as_json else sys.stdout, all_output)
    ranks: list[Rank] = []
    started = time.perf_counter()
    done = run_script(
        script,
        world_size,
        per_node=per_node,
        own=own,
        device=cast(Literal["cuda", "cpu"], device),
        on_rank=ranks.append,
        net=network,
        flops_per_s=flops,
        faults=faults,
        seed=seed,
        on_output=output.write,
        fake=fake,
        played=played,
    )
    output.end()
    row = {
        "script": script.name,
        "args": list(script.args),
        "net": net,
        "fault": fault,
        "flops_per_s": flops,
        **_facts(done, per_node),
        "memory_most_bytes": max((r.tally.peak for r in ranks), default=0),
        "notes": [
            *sorted({n for r in ranks for n in r.notes}),
            *_shared_by_ranks(done),
        ],
        "simulated_in_s": round(time.perf_counter() - started, 3),
    }
    pages = _written(done, row, html, perfetto, chakra, open_it=open_it)
    if as_json:
        show_json({**row, **pages})
    else:
        show(_report(row))
        show(
            [("dim", f"  {name}: {shown(Path(path))}") for name, path in pages.items()]
        )
    return 0 if done.outcome == "finished" else FAILED


def placed(world_size: int, nodes: str, node_size: int) -> tuple[int, int]:
    """How many ranks there are, and how many of them on each node.

    `nodes` is as in 32x8, or the number of nodes for `world_size` ranks; without it the
    network's nodes count, if they come out even.

    Raises:
        ValueError: it is malformed, or does not fit the number of ranks.
    """
    if not nodes:
        even = node_size and world_size % node_size == 0
        return world_size, node_size if even else world_size
    count, _, each = nodes.partition("x")
    if not count.isdigit() or (each and not each.isdigit()) or not int(count):
        raise ValueError(
            f'--nodes is "{nodes}", but it must look like 32x8, for 32 nodes of 8 ranks'
        )
    if each:
        return int(count) * int(each), int(each)
    if world_size % int(count):
        raise ValueError(
            f"{world_size} ranks can't be spread evenly over {count} nodes"
        )
    return world_size, world_size // int(count)


def _played(play: str, world_size: int, per_node: int) -> list[int]:
    """The ranks that execute the script, where fake tensors let others follow.

    Raises:
        ValueError: it's no list of ranks.
    """
    from distlab.sim.torch.played import default_cast

    if not play:
        return default_cast(world_size, per_node)
    if play == "all":
        return list(range(world_size))
    numbers = play.split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise ValueError(f'--play is "{play}"; write ranks as 0,1,255, or all')
    return [int(number) for number in numbers]


class Output:
    """Prints what rank 0 prints as it comes, or line by line what all ranks do."""

    def __init__(self, stream: Any, all_ranks: bool) -> None:
        self._stream, self._all = stream, all_ranks
        self._begun: dict[int, str] = {}

    def write(self, rank: int, text: str) -> None:
        """Take what a rank has printed."""
        if not self._all:
            if rank == 0:
                self._stream.write(text)
                self._stream.flush()
            return
        *lines, rest = (self._begun.get(rank, "") + text).split("\n")
        self._begun[rank] = rest
        for line in lines:
            self._stream.write(f"[rank {rank}] {line}\n")

    def end(self) -> None:
        """Print lines that were begun and never ended."""
        for rank, rest in sorted(self._begun.items()):
            if rest:
                self._stream.write(f"[rank {rank}] {rest}\n")
        self._stream.flush()


def _facts(done: SimRun, per_node: int) -> Row:
    from distlab.simulated.script_facts import facts_of

    return {**facts_of(done, per_node), "explanation": sentence_of(done)}


def sentence_of(done: SimRun) -> str:
    """How the run ended; for a hang, what the ranks disagree about."""
    from distlab.flight import find_hang
    from distlab.flight.simulated import records_of
    from distlab.runner.autopsy import own_frame, place
    from distlab.terminal import ranks_in_words

    first = done.primary()
    if first is not None and first.error is not None:
        error = first.error
        if error.type == "Refused":
            at = place(own_frame(error.frames))
            return f"{error.message} ({at})" if at else error.message
    if done.outcome != "deadlock":
        return done.explanation
    hang = find_hang(records_of(done))
    if hang.kind in ("apart", "agree", "finished"):
        return done.explanation
    left = [rank for rank in hang.absent if done.ranks[rank].status == "finished"]
    if left:
        has = "has" if len(left) == 1 else "have"
        return f"{hang.sentence}; {ranks_in_words(left)} {has} already finished"
    return hang.sentence


def _shared_by_ranks(done: SimRun) -> list[str]:
    """The package in which a rank failed: perhaps others had changed its state."""
    first = done.primary()
    if first is None or first.error is None or first.error.type == "Refused":
        return []
    for file, _ in reversed(first.error.frames):
        parts = Path(file).parts
        if "site-packages" in parts[:-1]:
            package = parts[parts.index("site-packages") + 1].removesuffix(".py")
            if package not in _STATELESS:
                return [
                    f"all ranks share the package {package}, so if it keeps state, "
                    f"try --own {package}"
                ]
    return []


_STATELESS = ("torch", "numpy")


def _written(
    done: SimRun, row: Row, html: str, perfetto: str, chakra: str, *, open_it: bool
) -> dict[str, str]:
    """Write the files that were asked for; return what they are and where.

    A file that lacks something, or that can't be written at all, gets a note in `row`.
    """
    from distlab.simulated.script_facts import MAX_EVENTS, is_long
    from distlab.trace import to_chakra, to_html, to_perfetto

    pages = {}
    if (html or open_it) and is_long(done):
        row["notes"].append(
            f"the run is too long for a timeline, because it has more than "
            f"{MAX_EVENTS:,} events; take fewer steps, or use --perfetto"
        )
    elif html or open_it:
        page = Path(html or f"{Path(row['script']).stem}-sim.html")
        to_html(done, page, title=row["script"], verdict=row["explanation"])
        pages["timeline"] = str(page)
        if open_it:
            open_page(page)
    if perfetto:
        if left_out := to_perfetto(done, Path(perfetto)):
            row["notes"].append(f"the Perfetto file lacks the last {left_out:,} events")
        pages["perfetto"] = perfetto
    if chakra:
        to_chakra(done, chakra)
        pages["chakra"] = chakra
    return pages


# ── the report ──────────────────────────────────────────────────────────────────────


def _report(row: Row) -> list[tuple[str, str]]:
    n, nodes, each = row["world_size"], row["nodes"], row["ranks_per_node"]
    where = "on 1 node" if nodes == 1 else f"on {nodes} nodes of {each}"
    ranks = "1 rank" if n == 1 else f"{n:,} ranks {where}"
    lines = [("plain", f"{row['script']}: {ranks}, {row['net']}")]
    if row["fault"]:
        lines.append(_line("faults", row["fault"]))
    if row["outcome"] == "finished":
        lines.append(_line("time", f"{time_words(row['time_s'])} of simulated time"))
    else:
        why = f"{row['outcome'].upper()}  {row['explanation']}"
        lines += [("fail", line) for line in wrapped(why, "  ")]
    lines += _memory(row) + _exposed(row) + _collectives(row) + _path(row)
    for note in row["notes"]:
        lines += [("dim", line) for line in wrapped(f"note: {note}", "  ")]
    wall = f"(simulated in {row['simulated_in_s']:.2f} s)"
    return [*lines, ("dim", f"  {wall}")]


def _line(name: str, words: str) -> tuple[str, str]:
    return "plain", f"  {name:<{_COLUMN}} {words}"


def _memory(row: Row) -> list[tuple[str, str]]:
    """What the rank that needs most memory needs, and who was played."""
    from distlab.terminal import ranks_in_words

    memory = row["memory"]
    if memory is None:
        most = (
            f"{size_words(row['memory_most_bytes'])} of tensors on a rank, at its peak"
        )
        return [_line("memory", most)] if row["memory_most_bytes"] else []
    whole = f"{size_words(memory['bytes'])} on rank {memory['rank']}, at its peak"
    lines = [_line("memory", whole)]
    for kind, size in memory["kinds"].items():
        if size:
            text = f"{size_words(size):>10}  {kind}"
            lines.append(("dim", f"  {'':<{_COLUMN}} {text}"))
    if len(row["played"]) < row["world_size"]:
        who = f"{ranks_in_words(row['played'])}; each other rank mirrors one of these"
        lines.append(_line("played", who))
    for one, other in row["unlike"]:
        text = f"  ranks {one} and {other} make different calls, so add some to --play"
        lines.append(("fail", text))
    return lines


def _exposed(row: Row) -> list[tuple[str, str]]:
    """How much of its time a rank waits for communication."""
    if not row["collectives"] or not row["time_s"]:
        return []
    mean, most = row["exposed_s"], row["exposed_most_s"]
    words = f"{time_words(mean)} per rank ({mean / row['time_s']:.0%} of the time)"
    if most > 1.01 * mean:
        words += f"; most on rank {row['exposed_most_rank']}, {time_words(most)}"
    return [_line("exposed", words)]


def _collectives(row: Row) -> list[tuple[str, str]]:
    """A table of what was called, per rank."""
    if not row["collectives"]:
        return [_line("calls", "the script doesn't call torch.distributed")]
    head = f"  {'per rank':<28}{'calls':>6}{'bytes':>10}{'under way':>11}"
    lines = [("dim", f"{head}{'exposed':>11}{'late':>11}")]
    for kind in row["collectives"]:
        name = kind["op"]
        if kind["group_size"] < row["world_size"]:
            name += f" ({kind['group_size']}, step {kind['group_stride']})"
        times = (kind["under_way_s"], kind["exposed_s"], kind["late_s"])
        under_way, exposed, late = (
            "–" if seconds is None else time_words(seconds) for seconds in times
        )
        text = f"  {name[:28]:<28}{kind['calls']:>6,}{size_words(kind['bytes']):>10}"
        lines.append(("plain", f"{text}{under_way:>11}{exposed:>11}{late:>11}"))
    return lines


_KINDS = {"message": "messages", "queue": "queues", "call": "calls", "work": "compute"}


def _path(row: Row) -> list[tuple[str, str]]:
    """What made the run take so long."""
    spent = row["critical_path"]
    if not spent or not sum(spent.values()):
        return []
    whole = sum(spent.values())
    parts = [f"{_KINDS[kind]} {seconds / whole:.0%}" for kind, seconds in spent.items()]
    lines = [_line("critical", ", ".join(parts))]
    for place in row["critical_lines"]:
        text = f"{place['seconds'] / whole:.0%} {place['op']}  {place['at']}"
        lines.append(("dim", f"  {'':<{_COLUMN}} {text}"))
    return lines
