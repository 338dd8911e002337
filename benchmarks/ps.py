"""A parameter server beside dead, frozen and slow processes: what is lost, who waits.

Eight workers on processes, two servers of their own processes with their logs on disk:
one worker is five times slower (a declared sleep), one is frozen by SIGSTOP, one is
killed, and each server is killed and started again, twice. See `_ps_real`; the servers
are those of 3.20 and 3.25, put together in `_ps_servers`.

    healthy_throughput_share   pushes per second of the healthy workers, by the same
                               without faults: pairs of runs, one after the other, in
                               either order (a dead process leaves its share of the
                               processor to others). The smaller one of both ways:
      asynchronous             by a run without any fault
      ssp                      by a run that has the slow worker too: everybody goes at
                               its pace, that is what the bound is for
    ssp_violations             pulls that were answered too far ahead, by the clocks in
                               the weights that came back (`_ps_observer`)
    lost_or_double_pushes      each push is a digit of its own in the servers' sums
    sim_scripts, sim_failures  the same servers and workers in virtual time, with torn
                               writes, lost messages and partitions as well
    planted_…                  a server that acknowledges before it syncs
    bad_frames, …_accepted     malformed, oversized, replayed and unproved ones

    distlab bench ps [--json]        exits with 1 when a bar is missed
    python benchmarks/ps.py [--pairs 5] [--scripts 2000] [--frames 100000] [--json]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks import _ps_observer as observer  # noqa: E402
from benchmarks import _ps_real as real  # noqa: E402
from benchmarks import _ps_sim as sim  # noqa: E402
from benchmarks._bad_frames import Attack  # noqa: E402
from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from benchmarks._ps_servers import bounded, durable  # noqa: E402
from benchmarks._ratios import Pair, lower_bound, ratio_of  # noqa: E402
from distlab.processes.tree import descendants  # noqa: E402
from distlab.runner import Cluster  # noqa: E402

AT_LEAST = {
    "healthy_throughput_share": 0.9,
    "sim_scripts": 1000,
    "bad_frames": 100_000,
    "planted_found": 1,
}
AT_MOST = {
    "ssp_violations": 0,
    "lost_or_double_pushes": 0,
    "unfinished_runs": 0,
    "leftover_processes": 0,
    "sim_failures": 0,
    "planted_shrunk_faults": 3,
    "bad_frames_accepted": 0,
}
BARS = Bars(AT_LEAST, AT_MOST)
result = BARS.line
PAIRS, SCRIPTS, FRAMES = 5, 2000, 100_000
ASYNC_PUSHES, SSP_PUSHES, HELD_PUSHES, HELD_S = 30, 16, 16, 3.0
PRELOAD = ("benchmarks._ps_work", "benchmarks._ps_servers")
_SHOWN = 5  # of the things that are wrong


@dataclass
class Tally:
    """What the runs on processes came to."""

    pairs: dict[str, list[list[Pair]]] = field(default_factory=dict)  # faulty, clean
    leads: list[observer.Lead] = field(default_factory=list)  # of the SSP runs
    wrong: list[str] = field(default_factory=list)  # pushes
    unfinished: list[str] = field(default_factory=list)  # runs
    pushes: int = 0
    restarts: int = 0
    runs: int = 0
    held_s: float = 0.0

    def take(self, seen: real.Seen, bound: int | None) -> float | None:
        """Judge a run; the rate of its healthy workers, if it came to its end."""
        rows, killed = seen.rows, seen.killed
        self.runs += 1
        self.restarts += seen.restarts
        self.pushes += observer.num_acked(rows)
        self.wrong += observer.miscounted(rows, seen.plan, killed)
        if bound is not None:
            self.leads += observer.leads(rows, seen.plan, killed)
        late = observer.unfinished(rows, seen.plan, killed)
        if late or seen.outcome != "finished":
            self.unfinished.append(f"workers {late}: {seen.explanation}")
            return None
        return observer.rate(rows, real.HEALTHY, seen.plan)


def on_processes(cluster: Cluster, pairs: int) -> Tally:
    """Pairs of runs, of each way to wait in turn; then one with a long freeze."""
    tally = Tally(pairs={"asynchronous": [], "ssp": []})
    for number in range(pairs):
        for way, scenes, bound in (
            ("asynchronous", real.asynchronous(ASYNC_PUSHES), None),
            ("ssp", real.ssp(SSP_PUSHES), real.BOUND),
        ):
            order = (1, 0) if number % 2 else (0, 1)
            rates = {
                place: tally.take(real.played(cluster, scenes[place]), bound)
                for place in order
            }
            clean, faulty = rates[0], rates[1]
            if clean is not None and faulty is not None:
                tally.pairs[way].append([(faulty, clean)])
    seen = real.played(cluster, real.held_up(HELD_PUSHES, HELD_S))
    tally.take(seen, real.BOUND)
    tally.held_s = observer.longest_pause_s(seen.rows, real.HEALTHY)
    return tally


def shares(tally: Tally) -> list[Line]:
    """The throughput of healthy workers, of both ways to wait; the worst one first."""
    lines, limits = [], real.limits_per_s(ASYNC_PUSHES, SSP_PUSHES)
    for way, launches in tally.pairs.items():
        if not launches:
            lines.append({"way": way, "value": 0.0, "lower": 0.0, "n": 0})
            continue
        faulty, clean = zip(*(pair for own in launches for pair in own), strict=True)
        lines.append(
            {
                "way": way,
                "value": round(ratio_of(launches), 4),
                "lower": round(lower_bound(launches), 4),
                "n": len(launches),
                "pushes_per_s": round(statistics.median(faulty), 2),
                "pushes_per_s_without_faults": round(statistics.median(clean), 2),
                "limit_per_s": round(limits[way], 2),
            }
        )
    return sorted(lines, key=lambda line: line["lower"])


def of_processes(tally: Tally) -> list[Line]:
    """The results of the runs on processes."""
    worst, *others = shares(tally)
    broken = observer.violations(tally.leads, real.BOUND)
    most = max((lead.lead for lead in tally.leads), default=0)
    return [
        result("healthy_throughput_share", unit="share", **worst),
        *(result(f"share_{line['way']}", unit="share", **line) for line in others),
        result("ssp_violations", len(broken), what=broken[:_SHOWN]),
        result("ssp_pulls", len(tally.leads)),
        result("ssp_largest_lead", most, "pushes", bound=real.BOUND),
        result("held_by_frozen_s", round(tally.held_s, 2), "s", frozen_s=HELD_S),
        result("lost_or_double_pushes", len(tally.wrong), what=tally.wrong[:_SHOWN]),
        result("pushes", tally.pushes),
        result("runs", tally.runs),
        result("server_restarts", tally.restarts),
        result("unfinished_runs", len(tally.unfinished), what=tally.unfinished),
    ]


def of_simulation(num_scripts: int) -> list[Line]:
    """The results in virtual time."""
    half = num_scripts // 2
    seen = [
        sim.play_random_scripts(num_scripts - half, durable, deadly=False),
        sim.play_random_scripts(half, bounded, deadly=True),
    ]
    failures = [failure for one in seen for failure in one.failures]
    planted = sim.planted(num_scripts)
    return [
        result("sim_scripts", sum(one.num_scripts for one in seen)),
        result("sim_failures", len(failures), what=failures[:_SHOWN]),
        result("planted_found", int(planted["is_found"]), scripts=planted["scripts"]),
        result(
            "planted_shrunk_faults",
            planted["faults"],
            script=planted["script"],
            what=[planted["sentence"]] if planted["sentence"] else [],
        ),
    ]


def of_frames(count: int) -> list[Line]:
    """The results of bad frames at a live server."""
    logging.getLogger("distlab.comm").setLevel(logging.ERROR)  # it says each reason
    outcome = Attack().run(count)
    accepted = result("bad_frames_accepted", outcome.bad_frames_accepted)
    accepted["met"] &= outcome.is_well  # afterwards a true caller was answered
    kinds = dict(outcome.by_kind)
    return [result("bad_frames", outcome.bad_frames, kinds=kinds), accepted]


def measure(pairs: int, num_scripts: int, num_frames: int) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    before = set(descendants(os.getpid()))
    with Cluster(preload=PRELOAD) as cluster:
        results = of_processes(on_processes(cluster, pairs))
        cluster.settle()
    left = len(set(descendants(os.getpid())) - before)
    results.append(result("leftover_processes", left))
    results += of_simulation(num_scripts) + of_frames(num_frames)
    return report_of("ps", results)


def text(results: Sequence[Line]) -> list[str]:
    """What is printed without --json."""
    return rows(results, _row)


def _row(line: Line) -> str:
    sure = f"  {line['way']}, lower {line['lower']:g}" if "way" in line else ""
    bar = BARS.told(line)
    return f"{line['name']:<26} {line['value']:>8g} {line['unit']}{bar}{sure}"


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--scripts", type=int, default=SCRIPTS)
    parser.add_argument("--frames", type=int, default=FRAMES)
    options = parser.parse_args()
    report = measure(options.pairs, options.scripts, options.frames)
    return show(report, text, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
