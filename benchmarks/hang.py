"""From the start of a program that hangs to the verdict that names it.

The hangs are the learner's files of `tests/hostile/hangs.toml`, graded as any other
file, and the programs of `_hangs.py`, run as they are; on a warm cluster. Each must be
named with a rank that waits, its call, and its line. The other hostile submissions are
handed in too, and every process that is still there afterwards is counted in /proc.

    distlab bench hang [--json]        exits with 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distlab.grading.hostile import HostileResult, judge
from distlab.grading.hostile_cases import FOLDER, HostileCase, read_cases
from distlab.processes.tree import descendants
from distlab.runner import Cluster
from distlab.runner.autopsy import evidence

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks._hangs import HANGS, Hang  # noqa: E402

BARS = {"autopsy_max_s": 1.5, "leftover_processes": 0, "wrong_verdicts": 0}
AT_LEAST = {"hangs": 25, "hostile_cases": 40}
Line = dict[str, Any]


def time_cases(cluster: Cluster, cases: Iterable[HostileCase]) -> list[Line]:
    """Hand each case in; one line of the report for each."""
    return [_line(result) for result in judge(ROOT, cluster, cases)]


def _line(result: HostileResult) -> Line:
    return {
        "id": result.case.id,
        "title": result.case.title,
        "hang": bool(result.case.call),
        "seconds": round(result.seconds, 3),
        "said": result.verdict.message,
        "problems": result.problems(),
        "left": result.left,
    }


def time_programs(cluster: Cluster, hangs: Iterable[Hang]) -> list[Line]:
    """Run each program; one line of the report for each."""
    return [_run(cluster, hang) for hang in hangs]


def _run(cluster: Cluster, hang: Hang) -> Line:
    before = set(descendants(os.getpid()))
    started = time.monotonic()
    run = cluster.run(hang.program, hang.world_size)
    seconds = time.monotonic() - started
    cluster.settle()
    lines = evidence(run)
    named = any(
        line.rank == hang.rank
        and line.state == "waiting"
        and hang.call in line.text
        and line.where.endswith(hang.place)
        for line in lines
    )
    problems = [] if run.outcome == "deadlock" else [f"{run.outcome}, no deadlock"]
    if not named:
        said = "; ".join(f"{e.rank} {e.state} {e.text} {e.where}" for e in lines)
        problems.append(f"not rank {hang.rank}, {hang.call}, {hang.place}: {said}")
    return {
        "id": hang.program.__name__,
        "title": (hang.program.__doc__ or "").strip(),
        "hang": True,
        "seconds": round(seconds, 3),
        "said": run.explanation,
        "problems": problems,
        "left": len(set(descendants(os.getpid())) - before),
    }


def warm_up(cluster: Cluster, cases: Sequence[HostileCase]) -> None:
    """Judge a hang of each unit untimed: what it imports is in the zygote then."""
    units = {case.task.partition(".")[0]: case for case in cases}
    time_cases(cluster, units.values())


def measure(cases: Sequence[HostileCase], programs: Sequence[Hang]) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    import torch

    able = [case for case in cases if not case.obstacle()]
    hanging = [case for case in able if case.call]
    before = set(descendants(os.getpid()))
    with Cluster(preload=("benchmarks._hangs",)) as cluster:
        cluster.start()
        warm_up(cluster, hanging)
        lines = time_cases(cluster, hanging) + time_programs(cluster, programs)
        timed = [line["seconds"] for line in lines]
        lines += time_cases(cluster, [case for case in able if not case.call])
    left = sum(line["left"] for line in lines)
    left += len(set(descendants(os.getpid())) - before)
    values = {
        "hangs": len(timed),
        "autopsy_max_s": max(timed, default=0.0),
        "autopsy_p50_s": round(statistics.median(timed or [0.0]), 3),
        "leftover_processes": left,
        "hostile_cases": len(able),
        "wrong_verdicts": sum(bool(line["problems"]) for line in lines),
    }
    return {
        "bench": "hang",
        "machine": {"cores": os.cpu_count(), "torch": torch.__version__},
        "results": [_result(name, value) for name, value in values.items()],
        "cases": lines,
        "skipped": {c.id: c.obstacle() for c in cases if c.obstacle()},
    }


def _result(name: str, value: float) -> Line:
    result: Line = {
        "name": name,
        "value": value,
        "unit": "s" if name.endswith("_s") else "",
    }
    if name in BARS:
        result |= {"bar": BARS[name], "met": value <= BARS[name]}
    if name in AT_LEAST:
        result |= {"bar": AT_LEAST[name], "met": value >= AT_LEAST[name]}
    return result


def missed(report: dict[str, Any]) -> list[str]:
    """The names of the results that miss their bar."""
    return [r["name"] for r in report["results"] if not r.get("met", True)]


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure(read_cases(ROOT / FOLDER), HANGS)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 1 if missed(report) else 0
    for line in report["cases"]:
        for problem in line["problems"]:
            print(f"{line['id']}  {line['title']}\n    {problem}")
    for result in report["results"]:
        bar = "" if result.get("met", True) else f"  MISSED, the bar is {result['bar']}"
        print(f"{result['name']:<20} {result['value']:>8} {result['unit']}{bar}")
    return 1 if missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
