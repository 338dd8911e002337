"""`distlab sim` and `distlab scale`: run a function on up to 4,096 simulated ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import show, show_json, waiting
from distlab.cli.sim_report import Row, beside, report, size_words, table
from distlab.cli.trace import open_page
from distlab.curriculum import Progress, load_curriculum
from distlab.curriculum.path import last_checked
from distlab.grading import FAILED
from distlab.paths import shown

if TYPE_CHECKING:
    from distlab.curriculum import Curriculum
    from distlab.sim import Network

DEFAULT_NET = "ethernet-100g"
MAX_RANKS = 4096
MEMORY_GIB = 8
COPIES = 3  # of the tensor, on each rank: its own, what arrives, and one to work with
WALL_S = 300.0
SCALES = tuple(2**power for power in range(1, 11))


def sim(
    name: str,
    *,
    world_size: int = 64,
    net: str = DEFAULT_NET,
    fault: str = "",
    size: str = "1MiB",
    code: str = "",
    seed: int = 0,
    html: str = "",
    perfetto: str = "",
    beside: bool = False,
    open_it: bool = False,
    as_json: bool = False,
) -> int:
    """Simulate one run; return 1 if it doesn't finish.

    Raises:
        ValueError: an unknown target, a malformed network, fault or size, or ranks that
            do not fit.
    """
    from distlab.sim import Faults

    curriculum = load_curriculum()
    name = name or _last_name(curriculum)
    settings = settings_for(curriculum, name, net, fault, size, code, seed)
    if beside and settings["source"]["side"] == "file":
        raise ValueError("--beside needs a task, because a file has no reference")
    if fault:
        Faults(**settings["faults"]).check(world_size)
    page = Path(html) if html else Progress(curriculum.root).folder / "last/sim.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    settings |= {"html": str(page.resolve()), "perfetto": "", "beside": beside}
    if perfetto:
        settings["perfetto"] = str(Path(perfetto).resolve())
    with waiting(f"simulating {world_size:,} ranks", quiet=as_json):
        (row,) = simulated(settings, [world_size])
    row["net"], row["fault"] = net, fault
    if as_json:
        show_json({**row, "html": str(page)})
    else:
        show(report(settings, row, parsed_net(net)))
        show([("dim", f"  timeline: {shown(page)}")])
        if perfetto:
            show([("dim", f"  for Perfetto: {shown(Path(perfetto))}")])
    if open_it:
        open_page(page)
    return 0 if _is_well(row) else FAILED


def scale(
    name: str,
    *,
    worlds: tuple[int, ...] = SCALES,
    net: str = DEFAULT_NET,
    size: str = "64KiB",
    code: str = "",
    seed: int = 0,
    as_json: bool = False,
) -> int:
    """Simulate runs of 2 … 1,024 ranks, with formulas and the lower bound.

    Raises:
        ValueError: as `sim`.
    """
    curriculum = load_curriculum()
    name = name or _last_name(curriculum)
    settings = settings_for(curriculum, name, net, "", size, code, seed)
    settings |= {"html": "", "perfetto": "", "beside": False}
    counts = worlds or SCALES
    ranks = ", ".join(f"{n:,}" for n in counts)
    with waiting(f"simulating {ranks} ranks", quiet=as_json):
        rows = simulated(settings, counts)
    network = parsed_net(net)
    for row in rows:
        row |= beside(settings, row, network)
    if as_json:
        show_json({"target": name, "net": net, "size": size, "runs": rows})
    else:
        show(table(settings, rows, network, net))
    return 0 if all(_is_well(row) for row in rows) else FAILED


def _last_name(curriculum: Curriculum) -> str:
    """Return the number of the task that was checked last.

    Raises:
        ValueError: it cannot be simulated.
    """
    from distlab.simulated.target import find_target

    number = last_checked(curriculum, Progress(curriculum.root)).number
    try:
        find_target(curriculum, number)
    except ValueError as error:
        raise ValueError(
            f"{number} was checked last, but can't be simulated: {error}; name "
            "another task, such as 1.4"
        ) from error
    return number


def _is_well(row: Row) -> bool:
    return row["outcome"] == "finished" and not row["wrong_ranks"]


def parsed_net(text: str) -> Network:
    """Return the requested network.

    Raises:
        ValueError: it is malformed.
    """
    from distlab.sim.net.spec import parse_net

    return parse_net(text)


def settings_for(
    curriculum: Curriculum,
    name: str,
    net: str,
    fault: str,
    size: str,
    code: str,
    seed: int,
) -> dict[str, Any]:
    """Return the request for the process that simulates.

    Raises:
        ValueError: some part of the request is malformed or unknown.
    """
    from distlab.sim.net.nets import as_data
    from distlab.sim.net.quantities import num_bytes
    from distlab.sim.net.spec import parse_faults
    from distlab.simulated.target import find_target

    if code not in ("", "mine", "reference"):
        raise ValueError(f"--code is {code!r}; choose mine or reference")
    target = find_target(curriculum, name, code)
    return {
        **target.as_data(),
        "title": target.title,
        "name": name,
        "net": as_data(parsed_net(net)),
        "faults": asdict(parse_faults(fault)) if fault else {},
        "num_bytes": num_bytes(size),
        "seed": seed,
    }


def simulated(
    settings: dict[str, Any], worlds: tuple[int, ...] | list[int]
) -> list[Row]:
    """Return the figures of a run at each size, each from a new process.

    Raises:
        ValueError: the ranks don't fit, or the code can't be simulated.
    """
    from distlab.ranks import new_cluster
    from distlab.runner import Limits
    from distlab.simulated.play import simulate_target

    for n in worlds:
        require_room(n, settings["num_bytes"])
    limits = Limits(seconds=WALL_S, memory_bytes=2 * MEMORY_GIB << 30)
    rows = []
    with new_cluster() as cluster:
        for n in worlds:
            done = cluster.run(
                simulate_target,
                1,
                {**settings, "world_size": n},
                limits=limits,
                journal=False,
            )
            if done.outcome != "finished":
                raise ValueError(_why(done, n))
            rows.append(done.values[0])
    return rows


def _why(done: Any, n: int) -> str:
    error = done.ranks[0].error
    if done.outcome == "timeout":
        return (
            f"{n} ranks didn't finish in {WALL_S:.0f} s; a rank that computes "
            "without calling comm can't be interrupted"
        )
    if error is None:
        return str(done.explanation)
    ours = error.type == "RunnerError"  # a sentence of the simulator's own
    return error.message if ours else f"{error.type}: {error.message}"


def require_room(world_size: int, num_bytes: int) -> None:
    """Require that the ranks and their tensors fit into this machine.

    Raises:
        ValueError: they don't fit.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"{world_size} ranks: choose between 1 and {MAX_RANKS:,} simulated ones"
        )
    gib = COPIES * world_size * num_bytes / (1 << 30)
    if gib > MEMORY_GIB:
        raise ValueError(
            f"{world_size} ranks with {size_words(num_bytes)} each need about "
            f"{gib:.0f} GiB: choose a smaller --size"
        )
