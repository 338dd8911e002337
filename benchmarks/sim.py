"""The simulated cluster: how fast, how exact, and whether it ends as real ranks do.

Large runs are timed in processor seconds of one core, each the median of a few. A ring
is held to what its program takes at least: on bare greenlets, in the same run, with a
switch and a copy for a message (_sim_bare.py). The corpus in `tests/corpora/programs`
runs whole on gloo, TCP and the simulator. Then the loopback of this machine is
measured, and what the simulator predicts from that is held to it.

    distlab bench sim [--json] [--corpus]      exits with 1 when a bar is missed
    python benchmarks/sim.py --only corpus     one part: runs, forms, stragglers,
                                               corpus or calibrate
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the corpus is imported by name, here and on the ranks

from benchmarks import _sim_corpus as corpus  # noqa: E402
from benchmarks import _sim_runs as runs  # noqa: E402

AT_MOST = {
    "ratio_ring_1024_size_over_limit": 2.2,
    "ratio_ring_1024_torch_over_limit": 1.5,
    "hier_4096_s": 15.0,
    "closed_form_max_rel_err": 1e-9,
    "calibrated_mean_err": 0.10,
    "stragglers_1000_s": 60.0,
    "stragglers_max_rel_err": 1e-9,
}
TRIES = 4  # as many runs as are asked for, on a busy machine
BUSY = "the machine was never calm: a bare run took longer than the one before"
AT_LEAST = {"corpus_programs": 50, "corpus_agree": 1.0, "corpus_line_named": 0.95}
Line = dict[str, Any]
Report = dict[str, Any]


def result(name: str, value: float | None, unit: str = "", **more: Any) -> Line:
    """One figure with its bar; a figure that there is not (None) does not meet it."""
    line: Line = {"name": name, "value": value, "unit": unit, **more}
    if name in AT_MOST:
        is_met = value is not None and value <= AT_MOST[name]
        line |= {"bar": AT_MOST[name], "met": is_met}
    if name in AT_LEAST:
        is_met = value is not None and value >= AT_LEAST[name]
        line |= {"bar": AT_LEAST[name], "met": is_met}
    return line


def large_runs(times: int) -> list[Line]:
    """The three runs that are timed; the smaller ones before warm torch up."""
    sizes: dict[str, tuple[Callable[[int], runs.Timed], int]] = {
        "ring_1024_size_s": (runs.ring_of_sizes, 1024),
        "ring_1024_torch_s": (runs.ring_of_tensors, 1024),
        "hier_4096_s": (runs.hierarchical_of_sizes, 4096),
    }
    lines = []
    for name, (simulate, n) in sizes.items():
        simulate(64)
        done = calm_runs(simulate, n, times)
        worst = max(one.rel_err for one in done)
        if worst > AT_MOST["closed_form_max_rel_err"]:
            raise SystemExit(f"{name}: the run is off its formula by {worst:g}")
        seconds = [round(one.cpu_s, 3) for one in done]
        median = statistics.median(seconds)
        lines.append(result(name, median, "CPU s", n=len(seconds), runs=seconds))
        lines += _over_limit(name.removesuffix("_s"), done)
    return lines


def calm_runs(
    simulate: Callable[[int], runs.Timed], n: int, times: int
) -> list[runs.Timed]:
    """So many runs during which the machine was calm, if it has that many to give.

    Otherwise all of them, the fastest in comparison with their limit first.
    """
    done: list[runs.Timed] = []
    while len(done) < TRIES * times:
        done.append(simulate(n))
        calm = [one for one in done if one.is_calm]
        if len(calm) == times:
            return calm
    return calm or sorted(done, key=lambda one: one.cpu_s / (one.limit_s or 1))[:times]


def _over_limit(name: str, done: Sequence[runs.Timed]) -> list[Line]:
    """How many times as long as the same program on bare greenlets, pair by pair."""
    pairs = [(one.cpu_s, one.limit_s) for one in done if one.limit_s is not None]
    if not pairs:
        return []
    ratios = [round(cpu_s / limit_s, 3) for cpu_s, limit_s in pairs]
    limit_s = round(statistics.median(limit_s for _, limit_s in pairs), 3)
    n = len(pairs)
    busy = {} if all(one.is_calm for one in done) else {"note": BUSY}
    return [
        result(f"{name}_limit_s", limit_s, "CPU s", n=n),
        result(
            f"ratio_{name}_over_limit",
            statistics.median(ratios),
            "ours/limit",
            n=n,
            runs=ratios,
            **busy,
        ),
    ]


def closed_forms() -> list[Line]:
    """The worst of all schedules on all numbers of ranks."""
    errors = runs.closed_form_errors()
    worst = max(errors, key=lambda name: errors[name])
    more = {"n": len(errors), "worst": worst}
    return [result("closed_form_max_rel_err", errors[worst], "", **more)]


def straggler_scenarios() -> list[Line]:
    """A thousand of them, and a few compared with a run of their own."""
    cpu_s, error = runs.stragglers()
    return [
        result("stragglers_1000_s", round(cpu_s, 3), "CPU s"),
        result("stragglers_max_rel_err", error, "", n=runs.SIMULATED),
    ]


def calibrated() -> list[Line]:
    """How far predictions are off what was held out, for two processes on TCP."""
    from distlab.runner import Cluster, RunnerError

    try:
        from distlab.sim.calibration.calibrate import calibrate

        with Cluster() as cluster:
            found = calibrate(cluster)
    except (ImportError, RunnerError) as error:
        return [result("calibrated_mean_err", None, "", note=str(error))]
    shown = [(n, found.mean_err_of(n)) for n in (3, 4)]
    proof = [
        {
            "algorithm": one.algorithm,
            "world_size": one.world_size,
            "bytes": one.num_bytes,
            "error": round(one.error, 4),
        }
        for one in found.proof
    ]
    return [
        result("calibrated_mean_err", round(found.mean_err, 4), "", proof=proof),
        *(result(f"calibrated_mean_err_n{n}", round(e, 4)) for n, e in shown if e == e),
    ]


def whole_corpus() -> tuple[list[Line], list[Line]]:
    """The results, and a line for each program."""
    rows = corpus.run_corpus()
    lines = [corpus.as_data(row) for row in rows]
    return [result(name, v) for name, v in corpus.figures(rows).items()], lines


def measure(parts: Sequence[str], times: int) -> Report:
    """All results of some parts, in the schema of every benchmark here."""
    import torch

    results: list[Line] = []
    programs: list[Line] = []
    if "runs" in parts:
        results += large_runs(times)
    if "forms" in parts:
        results += closed_forms()
    if "stragglers" in parts:
        results += straggler_scenarios()
    if "corpus" in parts:
        found, programs = whole_corpus()
        results += found
    if "calibrate" in parts:
        results += calibrated()
    return {
        "bench": "sim",
        "machine": {"cores": os.cpu_count(), "torch": torch.__version__},
        "results": results,
        "corpus": programs,
    }


def missed(report: Report) -> list[str]:
    """The names of the results that miss their bar."""
    return [r["name"] for r in report["results"] if not r.get("met", True)]


def text(report: Report, *, with_programs: bool) -> list[str]:
    """What is printed without --json; disagreements always are."""
    wrong = [line for line in report["corpus"] if line["disagreements"]]
    shown = report["corpus"] if with_programs else wrong
    lines = corpus.table(shown) if shown else []
    for one in report["results"]:
        value = "null" if one["value"] is None else f"{one['value']:.6g}"
        bar = "" if one.get("met", True) else f"  MISSED, the bar is {one['bar']}"
        why = f"  {one['note']}" if "note" in one else ""
        lines.append(f"{one['name']:<28} {value:>12} {one['unit']}{bar}{why}".rstrip())
    return lines


PARTS = ("runs", "forms", "stragglers", "corpus", "calibrate")


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--corpus", action="store_true", help="list all programs")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--times", type=int, default=3, help="how often it is timed")
    arguments = parser.parse_args()
    parts = (arguments.only,) if arguments.only else PARTS
    report = measure(parts, max(1, arguments.times))
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(text(report, with_programs=arguments.corpus)))
    return 1 if missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
