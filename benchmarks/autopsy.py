"""Does `distlab run` name the fault of every script that hangs, and of no other?

Every script in `tests/corpora/autopsy` runs as it is through `distlab run`. A hang is
named if the report has its guilty ranks, at the lines where they are stuck. A false
alarm is a verdict on a script without a fault. The seconds are those from the last
progress of any rank to the verdict.

A rank that is stuck in code of its own, such as a lock, can't be proved to be stuck. Of
these scripts we ask that the report after a stated time without progress says where
that rank is, and we don't count their seconds.

    distlab bench autopsy [--json]             exits with 1 when a bar is missed
    python benchmarks/autopsy.py NAME …        these scripts only
    python benchmarks/autopsy.py --torch       what torch says of the same scripts
    python benchmarks/autopsy.py --overhead    what recording costs a step of DDP
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._autopsy_cost import overhead  # noqa: E402
from benchmarks._autopsy_runs import Ended, run_and_explain  # noqa: E402
from benchmarks._autopsy_torch import in_torchs_words, table  # noqa: E402
from tests.corpora.autopsy_scripts import APART, Script, scripts  # noqa: E402

AT_LEAST = {"hangs": 60, "right_scripts": 60, "named": 0.97}
AT_MOST = {"false_alarms": 0, "seconds_p50_s": 1.0, "seconds_max_s": 3.0}
Line = dict[str, Any]


def problems_of(script: Script, ended: Ended) -> list[str]:
    """Everything about a run that isn't as its script's header wants it."""
    if not script.hangs:
        return _problems_of_a_right_one(ended)
    if ended.report is None:
        return [f"no report, {ended}"]
    if script.kind != APART and ended.status == "no-progress":
        return ["no verdict, only a report on no progress"]
    return [
        problem
        for rank in sorted(script.guilty)
        for problem in _problems_of_a_rank(script, ended, rank)
    ]


def _problems_of_a_right_one(ended: Ended) -> list[str]:
    if ended.report is not None:
        return [f"false alarm: {ended.report['sentence']}"]
    return [] if ended.exit_code == 0 else [f"no verdict, but {ended}"]


def _problems_of_a_rank(script: Script, ended: Ended, rank: int) -> list[str]:
    marks = script.marks_of(rank)
    if not marks:  # it has left: who waits for it is what can be pinned to a line
        named = rank in ended.named
        found = any(_is_at_a_mark(script, ended, other) for other in ended.rows)
        return [] if named and found else [f"rank {rank} isn't named as missing"]
    if script.kind != APART and rank not in ended.named:
        return [f"rank {rank} isn't named"]
    if _is_at_a_mark(script, ended, rank):
        return []
    row = ended.rows.get(rank, {})
    wanted = " or ".join(str(mark.line) for mark in marks)
    return [f"rank {rank} is at {wanted}, not at {row.get('line')} ({row.get('call')})"]


def _is_at_a_mark(script: Script, ended: Ended, rank: int) -> bool:
    row = ended.rows.get(rank, {})
    lines = {mark.line for mark in script.marks_of(rank)}
    return row.get("line") in lines and str(row.get("file")).endswith(script.path.name)


def judge(script: Script, limit_s: float) -> Line:
    """Run one script; one line of the report for it."""
    with tempfile.TemporaryDirectory(prefix="distlab-autopsy-") as folder:
        ended = run_and_explain(script, Path(folder), limit_s)
    report = ended.report or {}
    return {
        "id": script.name,
        "title": script.title,
        "ranks": script.world_size,
        "kind": script.kind,
        "report": script.report,
        "status": ended.status,
        "said": report.get("sentence", ""),
        "since_progress_s": report.get("since_progress_s"),
        "wall_s": round(ended.seconds, 1),
        "exit_code": ended.exit_code,
        "problems": problems_of(script, ended),
    }


def values_of(lines: Sequence[Line]) -> dict[str, float | None]:
    """The figures, from the lines of all scripts."""
    hangs = [line for line in lines if line["kind"]]
    right = [line for line in lines if not line["kind"]]
    seconds = [
        line["since_progress_s"]
        for line in hangs
        if line["status"] in ("deadlock", "mismatch")
    ]
    named = sum(not line["problems"] for line in hangs)
    return {
        "hangs": len(hangs),
        "right_scripts": len(right),
        "named": round(named / len(hangs), 3) if hangs else None,
        "false_alarms": sum(bool(line["status"]) for line in right),
        "right_scripts_failed": sum(bool(line["exit_code"]) for line in right),
        "seconds_p50_s": round(statistics.median(seconds), 3) if seconds else None,
        "seconds_max_s": round(max(seconds), 3) if seconds else None,
    }


def result(name: str, value: float | None) -> Line:
    """One figure with its bar; a figure that there is not (None) doesn't meet it."""
    line: Line = {
        "name": name,
        "value": value,
        "unit": "s" if name.endswith("_s") else "",
    }
    if name in AT_MOST:
        is_met = value is not None and value <= AT_MOST[name]
        line |= {"bar": AT_MOST[name], "met": is_met}
    if name in AT_LEAST:
        is_met = value is not None and value >= AT_LEAST[name]
        line |= {"bar": AT_LEAST[name], "met": is_met}
    return line


def missed(report: Line) -> list[str]:
    """The names of the results that miss their bar."""
    return [
        line["name"]
        for line in report["results"]
        if not line.get("met", line.get("is_met", True))
    ]


def measure(chosen: Sequence[Script], *, limit_s: float, jobs: int) -> Line:
    """All results, in the schema of every benchmark here."""
    import torch

    with ThreadPoolExecutor(jobs) as pool:
        lines = list(pool.map(lambda script: judge(script, limit_s), chosen))
    return {
        "bench": "autopsy",
        "machine": {"cores": os.cpu_count(), "torch": torch.__version__, "jobs": jobs},
        "results": [result(name, value) for name, value in values_of(lines).items()],
        "cases": lines,
    }


def _tell_overhead(*, as_json: bool) -> int:
    results = overhead()
    if as_json:
        print(json.dumps({"bench": "autopsy", "results": results}, indent=1))
    for line in [] if as_json else results:
        upper = "" if line["upper"] is None else f", at most {line['upper']:.4f}"
        print(f"{line['name']:<24} {line['value']:.4f} {line['unit']}{upper}")
    return 1 if missed({"results": results}) else 0


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these scripts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--torch", action="store_true", help="torch's own words")
    parser.add_argument("--overhead", action="store_true", help="cost of a DDP step")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per script")
    arguments = parser.parse_args()
    if arguments.overhead:
        return _tell_overhead(as_json=arguments.json)
    chosen = [
        script
        for script in (*scripts("hangs"), *scripts("right"))
        if not arguments.names or script.name in arguments.names
    ]
    if arguments.torch:
        hangs = [script for script in chosen if script.hangs]
        lines = in_torchs_words(hangs, jobs=arguments.jobs)
        print(json.dumps(lines, indent=1) if arguments.json else table(lines))
        return 0
    report = measure(chosen, limit_s=arguments.limit, jobs=arguments.jobs)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 1 if missed(report) else 0
    for line in report["cases"]:
        for problem in line["problems"]:
            print(f"{line['id']} ({line['ranks']} ranks)\n    {problem}")
            print(f"    {line['said']}" if line["said"] else "    it said nothing")
    for figure in report["results"]:
        bar = "" if figure.get("met", True) else f"  MISSED, the bar is {figure['bar']}"
        print(f"{figure['name']:<22} {figure['value']!s:>8} {figure['unit']}{bar}")
    return 1 if missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
