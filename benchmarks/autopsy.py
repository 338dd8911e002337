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

import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import _autopsy_cost as cost
from benchmarks._autopsy_runs import Ended, run_and_explain
from benchmarks._autopsy_torch import in_torchs_words, table
from benchmarks._bars import Bench, Line, Report
from tests.corpora.autopsy_scripts import APART, Script, scripts

BENCH = Bench(
    "autopsy",
    __doc__,
    at_least={"hangs": 60, "right_scripts": 60, "named": 0.97},
    at_most={
        "false_alarms": 0,
        "seconds_p50_s": 1.0,
        "seconds_max_s": 3.0,
        "overhead_processor": 1.01,  # recorded steps take at most 1 % longer
    },
)


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


def figures(lines: Sequence[Line]) -> list[Line]:
    """The results, from the lines of all scripts."""
    hangs = [line for line in lines if line["kind"]]
    right = [line for line in lines if not line["kind"]]
    seconds = [
        line["since_progress_s"]
        for line in hangs
        if line["status"] in ("deadlock", "mismatch")
    ]
    named = sum(not line["problems"] for line in hangs)
    median_s = round(statistics.median(seconds), 3) if seconds else None
    return [
        BENCH.line("hangs", len(hangs)),
        BENCH.line("right_scripts", len(right)),
        BENCH.line("named", round(named / len(hangs), 3) if hangs else None),
        BENCH.line("false_alarms", sum(bool(line["status"]) for line in right)),
        BENCH.line("right_scripts_failed", sum(bool(e["exit_code"]) for e in right)),
        BENCH.line("seconds_p50_s", median_s, "s"),
        BENCH.line("seconds_max_s", round(max(seconds), 3) if seconds else None, "s"),
    ]


def problems(report: Report) -> list[str]:
    """What is printed above the figures without --json."""
    told = []
    for line in report.get("cases", ()):
        for problem in line["problems"]:
            told.append(f"{line['id']} ({line['ranks']} ranks)\n    {problem}")
            told.append(
                f"    {line['said']}" if line["said"] else "    it said nothing"
            )
    return [*told, *([report["table"]] if "table" in report else [])]


def measure(
    names: Sequence[str], torch: bool, overhead: bool, jobs: int, limit: float
) -> Report:
    """All results of these scripts, or of all."""
    if overhead:
        return BENCH.report(cost.overhead(BENCH))
    both = (*scripts("hangs"), *scripts("right"))
    chosen = [script for script in both if not names or script.name in names]
    if torch:
        hangs = [script for script in chosen if script.hangs]
        lines = in_torchs_words(hangs, jobs=jobs)
        return BENCH.report([], lines=lines, table=table(lines))
    with ThreadPoolExecutor(jobs) as pool:
        lines = list(pool.map(lambda script: judge(script, limit), chosen))
    return BENCH.report(figures(lines), cases=lines, jobs=jobs)


if __name__ == "__main__":
    flags = {"torch": False, "overhead": False}
    sys.exit(BENCH.main(measure, problems, names=[], **flags, jobs=1, limit=60.0))
