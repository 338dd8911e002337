"""From the start of a program that hangs to the verdict that names it.

The hangs are the learner's files of `tests/hostile/hangs.toml`, graded as any other
file, and the programs of `tests/corpora/hangs.py`, run as they are; on a warm cluster.
Each must be named with a rank that waits, its call, and its line. The other hostile
submissions are handed in too, and every process that is still there afterwards is
counted in /proc.

    distlab bench hang [--json]        exits with 1 when a bar is missed
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._bars import Bench, Line, Report
from distlab.grading.hostile import HostileResult, judge
from distlab.grading.hostile_cases import FOLDER, HostileCase, read_cases
from distlab.processes.tree import descendants
from distlab.runner import Cluster
from distlab.runner.autopsy import evidence
from tests.corpora.hangs import HANGS, Hang

ROOT = Path(__file__).parents[1]
BENCH = Bench(
    "hang",
    __doc__,
    at_least={"hangs": 25, "hostile_cases": 40},
    at_most={"autopsy_max_s": 1.5, "leftover_processes": 0, "wrong_verdicts": 0},
)


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


def time_program(cluster: Cluster, hang: Hang) -> Line:
    """Run a program; the line of the report for it."""
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


def measure(
    cases: Sequence[HostileCase] | None = None, programs: Sequence[Hang] = HANGS
) -> Report:
    """All figures, and a line for each case; of these cases, or of all."""
    cases = read_cases(ROOT / FOLDER) if cases is None else cases
    able = [case for case in cases if not case.obstacle()]
    hanging = [case for case in able if case.call]
    before = set(descendants(os.getpid()))
    with Cluster(preload=("tests.corpora.hangs",)) as cluster:
        cluster.start()
        # A hang of each unit is judged untimed: what it imports is in the zygote then.
        time_cases(cluster, {c.task.partition(".")[0]: c for c in hanging}.values())
        lines = time_cases(cluster, hanging)
        lines += [time_program(cluster, program) for program in programs]
        timed = [line["seconds"] for line in lines]
        lines += time_cases(cluster, [case for case in able if not case.call])
    left = sum(line["left"] for line in lines)
    left += len(set(descendants(os.getpid())) - before)
    wrong = [f"{line['id']}: {what}" for line in lines for what in line["problems"]]
    results = [
        BENCH.line("hangs", len(timed)),
        BENCH.line("autopsy_max_s", max(timed, default=0.0), "s"),
        BENCH.line("autopsy_p50_s", round(statistics.median(timed or [0.0]), 3), "s"),
        BENCH.line("leftover_processes", left),
        BENCH.line("hostile_cases", len(able)),
        BENCH.line(
            "wrong_verdicts", sum(bool(w["problems"]) for w in lines), what=wrong
        ),
    ]
    skipped = {c.id: c.obstacle() for c in cases if c.obstacle()}
    return BENCH.report(results, cases=lines, skipped=skipped)


if __name__ == "__main__":
    sys.exit(BENCH.main(measure))
