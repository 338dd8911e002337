"""Checkpoints on a real disk: how long training waits, and what damage does.

stall_ratio_vs_sync        the time that training waits in AsyncSaver.save, by that
                           of torch.save with fsync: pairs in turn, in the same
                           processes, of a state of 872 MB on two ranks
stall_ratio_vs_dcp         the same by torch.distributed.checkpoint.async_save
stall_ratio_…_small        both for a state of 218 MB; shown, without a bar
corruptions, …_missed      truncations and flipped bits over every file of two
                           checkpoints; missed: the damaged one was loaded, or the
                           one before it was not
kills_while_saving,        SIGKILL of one rank or all ranks, which left the files of
unloadable                 an unfinished save, and some others; unloadable: what
                           save() had returned for is gone, after any of them
disk_full_…                the disk of one rank is full for two steps: steps that
                           were trained, warnings, the step that is loaded then
planted_…                  a save that waits for the disk, and a load that reads no
                           checksums: the bars must reject both

distlab bench checkpoint [--json]      exits with 1 when a bar is missed
python benchmarks/checkpoint.py [--rounds 6] [--damages 2000] [--kills 200]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _ckpt_damage as damage
from benchmarks import _ckpt_ranks as ranks
from benchmarks._bars import Bench, Line
from benchmarks._ratios import Pair, on_ranks, ratio_of, slowest
from distlab.comm import RealDisk
from distlab.curriculum import load, load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.runner import Cluster
from distlab.training.ddp_code import as_parts

AT_LEAST = {
    "corruptions": 2000,
    "kills_while_saving": 200,
    "state_mb": 200,
    "disk_full_steps_trained": 8,
    "planted_rejected": 2,
}
AT_MOST = {
    "stall_ratio_vs_sync": 0.10,
    "stall_ratio_vs_dcp": 1.0,
    "corruptions_missed": 0,
    "unloadable": 0,
    "disk_full_warnings": 2,
}
BENCH = Bench("checkpoint", __doc__, at_least=AT_LEAST, at_most=AT_MOST)
_line = BENCH.line
STATE_BYTES, SMALL_BYTES, WORLD = 832 << 20, 208 << 20, 2
ROUNDS, LAUNCHES, DAMAGES, KILLS = 6, 4, 2000, 200
KILLED_BYTES = 4 << 20
UNIT = load("fault_tolerance", "reference")
PRELOAD = ("torch._dynamo", damage.__name__)
Launches = list[list[Pair]]


def stalls(
    cluster: Cluster,
    parts: dict[str, Any],
    *,
    rounds: int,
    launches: int,
    num_bytes: int = SMALL_BYTES,
    planted: bool = False,
) -> tuple[Launches, Launches]:
    """Pairs (ours, sync) and (ours, DCP) in seconds: of the rank that waits longest."""
    by_sync: Launches = []
    by_dcp: Launches = []
    for _ in range(launches):
        with _disk() as disk:
            how = disk, parts, num_bytes, rounds, planted
            rows = slowest(
                on_ranks(cluster, ranks.stalls, WORLD, *how, limits=damage.LIMITS)
            )
        by_sync.append([(ours, sync) for ours, sync, _ in rows])
        by_dcp.append([(ours, dcp) for ours, _, dcp in rows])
    return by_sync, by_dcp


def _disk() -> tempfile.TemporaryDirectory[str]:
    """A folder on a disk that git does not see; /tmp may be memory."""
    folder = Path(__file__).parents[1] / ".distlab"
    folder.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=folder)


def of_stalls(cluster: Cluster, parts: dict[str, Any], rounds: int) -> list[Line]:
    """Both ratios with their upper bounds, for both sizes of the state."""
    lines = []
    for size, num_bytes in (("", STATE_BYTES), ("_small", SMALL_BYTES)):
        by_sync, by_dcp = stalls(
            cluster, parts, rounds=rounds, launches=LAUNCHES, num_bytes=num_bytes
        )
        lines += [
            BENCH.ratio(f"stall_ratio_vs_sync{size}", by_sync, "torch.save and fsync"),
            BENCH.ratio(f"stall_ratio_vs_dcp{size}", by_dcp, "dcp.async_save"),
        ]
    return [*lines, _line("state_mb", round(STATE_BYTES / 1e6), "MB")]


def saved_in(cluster: Cluster, parts: dict[str, Any], folder: str) -> Path:
    """A folder with two checkpoints of three ranks."""
    cluster.run(
        damage.two_checkpoints,
        damage.RANKS,
        parts,
        folder,
        damage.SAVED_BYTES,
        limits=damage.LIMITS,
    ).require_finished()
    return Path(folder)


def of_damage(cluster: Cluster, parts: dict[str, Any], count: int) -> list[Line]:
    """Torn and flipped files."""
    with _disk() as folder:
        tally = damage.damaged(UNIT.load, saved_in(cluster, parts, folder), count)
    return [
        _line("corruptions", tally.done, f"in {len(tally.files)} files"),
        _line(
            "corruptions_missed", len(tally.missed), what=tally.missed[: damage.SHOWN]
        ),
    ]


def of_kills(cluster: Cluster, parts: dict[str, Any], count: int) -> list[Line]:
    """Killed ranks."""
    with _disk() as folder:
        place = Path(folder)
        tally = damage.killed(cluster, UNIT.load, parts, place, count, KILLED_BYTES)
    return [
        _line("kills_while_saving", tally.saving, f"of {tally.done} kills"),
        _line(
            "unloadable", len(tally.unloadable), what=tally.unloadable[: damage.SHOWN]
        ),
    ]


def of_full_disk(cluster: Cluster, parts: dict[str, Any]) -> list[Line]:
    """Training goes on, and says what is wrong."""
    with _disk() as folder:
        run = cluster.run(
            ranks.on_full_disk, WORLD, parts, folder, limits=damage.LIMITS
        )
        values = run.require_finished().values
        found = UNIT.load(RealDisk(folder))
    warned = values[0]["warned"]
    return [
        _line("disk_full_steps_trained", min(v["trained"] for v in values), "of 8"),
        _line("disk_full_warnings", len(warned), what=[text for _, text in warned]),
        _line("disk_full_loaded_step", found.step if found else 0, "of 8"),
    ]


def of_planted(cluster: Cluster, parts: dict[str, Any], count: int) -> list[Line]:
    """The bars reject a save that waits, and a load without checksums."""
    by_sync, _ = stalls(cluster, parts, rounds=3, launches=1, planted=True)
    with _disk() as folder:
        place = saved_in(cluster, parts, folder)
        tally = damage.damaged(damage.without_checksums(UNIT), place, count)
    ratio, missed = ratio_of(by_sync), len(tally.missed)
    rejected = (ratio > AT_MOST["stall_ratio_vs_sync"]) + (missed > 0)
    return [
        _line("planted_stall_ratio", round(ratio, 4), "ours/peer"),
        _line("planted_corruptions_missed", missed, f"of {tally.done}"),
        _line("planted_rejected", rejected, "of 2"),
    ]


def measure(rounds: int, damages: int, kills: int) -> list[Line]:
    """All figures."""
    parts = as_parts(chosen_unit(load_curriculum(), "fault_tolerance", "reference"))
    with Cluster(preload=PRELOAD) as cluster:
        return [
            *of_stalls(cluster, parts, rounds),
            *of_damage(cluster, parts, damages),
            *of_kills(cluster, parts, kills),
            *of_full_disk(cluster, parts),
            *of_planted(cluster, parts, max(20, damages // 10)),
        ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, rounds=ROUNDS, damages=DAMAGES, kills=KILLS))
