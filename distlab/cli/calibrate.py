"""`distlab calibrate`: measure this machine's link, write its table and prove it."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, show, show_json, waiting, warn, wrapped
from distlab.cli.sim_report import size_words
from distlab.curriculum import CurriculumError, Progress, find_root
from distlab.grading.verdict import HARNESS
from distlab.paths import shown

if TYPE_CHECKING:
    from distlab.sim.calibration.calibrate import Calibration, Measurements, Prediction

LINK_FILE = "link.json"
TRAINS = "distlab.sim.calibration.trains"
_MOST_S = 3600.0
_RESTLESS = 0.25


def calibrate(
    *,
    out: str = "",
    seconds: float = 20.0,
    as_json: bool = False,
    plan: Measurements | None = None,
) -> int:
    """Measure, prove and write a table, but write nothing if measuring fails.

    Raises:
        ValueError: the time is invalid, or we can't write the file.
    """
    if not 0 < seconds <= _MOST_S:
        raise ValueError(
            f"--seconds {seconds:g}: choose a number above 0 and up to 3600"
        )
    path = _writable(Path(out) if out else _own_file())
    problem = _no_loopback()
    if problem:
        warn(f"can't connect to 127.0.0.1: {problem}; is a firewall in the way?")
        return HARNESS
    if not as_json:
        show([("dim", f"measuring for about {seconds:g} s; keep this machine quiet")])
    from distlab.runner import Cluster, RunnerError
    from distlab.sim.calibration.calibrate import calibrate as measure

    try:
        sign = waiting(f"measuring for about {seconds:g} s in total", quiet=as_json)
        with sign, Cluster(preload=(TRAINS,)) as cluster:
            found = measure(cluster, seconds, plan=plan)
    except RunnerError as error:
        warn(
            f"the processes did not finish: {error}; `{command('doctor')}` may know why"
        )
        return HARNESS
    _save(found, path)
    if as_json:
        show_json(as_data(found, path))
    else:
        show([*link_lines(found), *proof_lines(found), *_end(found, path)])
    return 0


def as_data(found: Calibration, path: Path) -> dict[str, Any]:
    """Return all results, for `--json`."""
    proof = [
        {**asdict(one), "error": one.error, "miss": one.is_miss} for one in found.proof
    ]
    worlds = sorted({one.world_size for one in found.proof})
    return {
        "file": str(path),
        "latency_s": found.latency_s,
        "bytes_per_s": found.bytes_per_s,
        "rounds": found.rounds,
        "unrest": found.unrest,
        "cores": found.cores,
        "table": asdict(found.net),
        "proof": proof,
        "calibrated_mean_err": found.mean_err,
        "mean_err_by_processes": {str(n): found.mean_err_of(n) for n in worlds},
    }


# ── the file ────────────────────────────────────────────────────────────────────────


def _own_file() -> Path:
    try:
        folder = Progress(find_root()).folder
        folder.mkdir(parents=True, exist_ok=True)
    except CurriculumError as error:
        raise ValueError(f"{error}; you can choose a file with --out FILE") from None
    except OSError as error:
        raise ValueError(
            f"can't write {shown(folder)}: {error.strerror}; choose a file with --out"
        ) from None
    return folder / LINK_FILE


def _writable(path: Path) -> Path:
    """Return the path if we can write a table there; checked before we measure.

    Raises:
        ValueError: we can't, or we would overwrite some other file.
    """
    from distlab.sim.net.piecewise import Piecewise

    if path.exists() and not path.is_file():
        raise ValueError(f"{shown(path)} isn't a file; name one, such as laptop.json")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"can't write {shown(path)}: {error.strerror}; choose another --out"
        ) from None
    if path.exists() and path.stat().st_size:
        try:
            Piecewise.load(path)
        except ValueError:
            raise ValueError(
                f"{shown(path)} exists but isn't a link table; choose another --out"
            ) from None
    return path


def _save(found: Calibration, path: Path) -> None:
    # Beside, then renamed: Ctrl-C leaves the old table whole.
    beside = path.with_name(f"{path.name}.part")
    try:
        notes = {"over": "TCP on this machine", "cores": found.cores}
        found.net.save(beside, **notes, calibrated_mean_err=found.mean_err)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _no_loopback() -> str:
    """Say why this machine can't connect to itself; empty if it can."""
    from distlab.cli.doctor import check_loopback

    found = check_loopback()
    return "" if found.state == "ok" else found.figure


# ── on the screen ───────────────────────────────────────────────────────────────────


def link_lines(found: Calibration) -> list[tuple[str, str]]:
    """Format the measured table."""
    net = found.net
    lines = [
        ("", ""),
        ("", f"  a message between 2 processes over TCP, {found.rounds} rounds"),
        ("", ""),
        (
            "dim",
            f"  {'size':>9}{'one way':>12}{'back & forth':>15}{'both ways':>12}"
            f"{'speed':>13}{'a += b':>12}",
        ),
    ]
    columns = (net.back_and_forth_s, net.both_ways_s, net.adding_s)
    for (size, one_way_s), back_s, both_s, adding_s in zip(
        net.table, *columns, strict=True
    ):
        speed = f"{size / one_way_s / 1e9:.2f} GB/s" if size else "–"
        lines.append(
            (
                "",
                f"  {size_words(size):>9}{time_words(one_way_s):>12}"
                f"{time_words(back_s):>15}{time_words(both_s):>12}{speed:>13}"
                f"{time_words(adding_s):>12}",
            )
        )
    lines.append(("", ""))
    latency, speed = time_words(found.latency_s), f"{found.bytes_per_s / 1e9:.2f} GB/s"
    lines.append(("", f"  latency {latency} · bandwidth {speed}"))
    return lines


def proof_lines(found: Calibration) -> list[tuple[str, str]]:
    """Show how far off the predictions are, for cases that aren't in the table.

    There is a row per algorithm and a column per size; `--json` has the seconds.
    """
    rows: dict[tuple[int, str], dict[int, Prediction]] = {}
    for one in found.proof:
        rows.setdefault((one.world_size, one.algorithm), {})[one.num_bytes] = one
    sizes = sorted({one.num_bytes for one in found.proof})
    head = "".join(f"{size_words(size):>10}" for size in sizes)
    return [
        ("", ""),
        (
            "",
            "  error of the simulator's predictions by size, for algorithms and sizes",
        ),
        ("", "  that its table doesn't contain"),
        ("", ""),
        ("dim", f"  {'ranks':>5}  {'algorithm':<20}{head}"),
        *(
            ("", f"  {ranks:>5}  {algorithm:<20}{_errors(by_size, sizes)}")
            for (ranks, algorithm), by_size in rows.items()
        ),
    ]


def _errors(by_size: dict[int, Prediction], sizes: list[int]) -> str:
    return "".join(
        f"{100 * by_size[size].error:>+8.0f}\N{NO-BREAK SPACE}%"
        if size in by_size
        else " " * 10
        for size in sizes
    )


def _end(found: Calibration, path: Path) -> list[tuple[str, str]]:
    pairs = [one for one in found.proof if one.world_size == 2]
    from distlab.sim.calibration.calibrate import MISS

    misses = sum(one.is_miss for one in pairs)
    lines = [
        f"mean error with 2 processes: {_percent(found.mean_err, 1)}; "
        f"{misses} of {len(pairs)} predictions miss by more than {_percent(MISS)}"
    ]
    more = sorted({one.world_size for one in found.proof} - {2})
    if more:
        errors = ", ".join(f"{_percent(found.mean_err_of(n))} with {n}" for n in more)
        turns = (
            f"; this machine has {found.cores} cores, and no table accounts for the "
            "cost of taking turns on them"
        )
        crowded = max(more) > found.cores
        lines.append(f"mean error {errors}: shown only{turns if crowded else ''}")
    if found.unrest > _RESTLESS:
        lines.append(
            "this machine was busy: half of the rounds took "
            f"{_percent(found.unrest)} longer than those we count; try again when it "
            "is quiet"
        )
    net = shlex.quote(f"table:{shown(path)}")
    return [
        ("", ""),
        *(("", row) for line in lines for row in wrapped(line, "  ")),
        ("", ""),
        ("", f"  {command(f'sim 1.4 --net {net}')}"),
    ]


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def time_words(seconds: float) -> str:
    """Format microseconds, or milliseconds from 10 ms on."""
    if not math.isfinite(seconds):
        return "–"
    micros = seconds * 1e6
    if micros >= 10_000:
        return f"{micros / 1000:.1f} ms"
    return f"{micros:.1f} µs" if micros < 100 else f"{micros:,.0f} µs"
