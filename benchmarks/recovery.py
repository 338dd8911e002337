"""From SIGKILL of a rank to the next optimizer step by all ranks: how long it takes.

Three ranks train on the digits, with one standby, under `distlab.launch --standby 1`;
the same script runs under `torchrun --max-restarts`, which starts all ranks again from
a checkpoint (one in 100 steps). Rounds of both take turns. Every third kill is rank 0.

    p50_s, p95_s, max_s   from the signal until all ranks, the new one too, have
                          completed one more step
    detect_s …            medians of its segments: until all survivors have lost their
                          peer; teardown: until all processes have joined; rendezvous:
                          until they are connected; restore: until all have the state;
                          first step
    ratio_torchrun_over_ours   of the medians
    lost_steps            completed before a kill, and computed again after it
    bit_equal             the weights of each killed training are those of a training
                          that nothing has interrupted, under distlab.launch alone

A step takes about 15 ms: 10 of them are a sleep, so that a training lives long enough.

    distlab bench recovery [--json]        exits with 1 when a bar is missed
    python benchmarks/recovery.py [--rounds 5] [--kills 7] [--save FILE] [--json]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks._bars import Bench, Line, Report
from tests.corpora import recovery_jobs as jobs

AT_LEAST = {"kills": 30, "ratio_torchrun_over_ours": 10, "bit_equal": 1}
AT_MOST = {"p50_s": 0.3, "p95_s": 0.6, "lost_steps": 0}
BENCH = Bench("recovery", __doc__, at_least=AT_LEAST, at_most=AT_MOST)
result = BENCH.line
ROUNDS, KILLS, TORCHRUN_KILLS = 5, 7, 2
NUM_STEPS = 6000
STAGES = ("lost_s", "joined_s", "formed_s", "restored_s", "completed_s")
SEGMENTS = ("detect_s", "teardown_s", "rendezvous_s", "restore_s", "first_step_s")


def victims(num: int) -> list[int]:
    """Ranks to kill: every third is rank 0, the others are drawn."""
    return [0 if i % 3 == 0 else random.randrange(1, 3) for i in range(num)]


def segments(kill: jobs.Kill) -> list[float]:
    """How long each segment of a recovery took; none where no agent says so."""
    if not kill.stages:
        return []
    times = [kill.killed_s, *(kill.stages[stage] for stage in STAGES)]
    return [later - earlier for earlier, later in pairwise(times)]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def of_kills(
    own: Sequence[jobs.Kill], other: Sequence[jobs.Kill], equal: Sequence[bool]
) -> list[Line]:
    """All results."""
    seconds = [kill.seconds for kill in own]
    median_s = statistics.median(seconds)
    lines = [
        result("kills", len(own), of_rank_0=sum(kill.rank == 0 for kill in own)),
        result("p50_s", round(median_s, 4), "s"),
        result("p95_s", round(quantile(seconds, 0.95), 4), "s"),
        result("max_s", round(max(seconds), 4), "s"),
    ]
    parts = [segments(kill) for kill in own]
    for name, values in zip(SEGMENTS, zip(*parts, strict=True), strict=True):
        lines.append(result(name, round(statistics.median(values), 4), "s"))
    lines += [
        result("lost_steps", sum(kill.lost_steps for kill in own)),
        result("bit_equal", int(all(equal)), trainings=len(equal)),
    ]
    if other:
        theirs_s = statistics.median(kill.seconds for kill in other)
        lost = [kill.lost_steps for kill in other]
        lines += [
            result("torchrun_p50_s", round(theirs_s, 3), "s", n=len(other)),
            result("torchrun_lost_steps", statistics.median(lost), "of a kill"),
            result("ratio_torchrun_over_ours", round(theirs_s / median_s, 1)),
        ]
    return lines


def play_kills(
    rounds: int, kills: int, num_steps: int
) -> tuple[list[jobs.Kill], list[jobs.Kill], list[bool]]:
    """Kill ranks, ours and torchrun's in turn; the kills of both, and equal digests."""
    with jobs.plain(num_steps) as job:
        expected = job.finish()
    own: list[jobs.Kill] = []
    other: list[jobs.Kill] = []
    equal: list[bool] = []
    for _ in range(rounds):
        with jobs.ours(num_steps) as job:
            own += [job.kill(r, needs_standby=True) for r in victims(kills)]
            equal.append(job.finish() == expected)
        with jobs.torchrun(num_steps) as job:
            for rank in victims(TORCHRUN_KILLS):
                other.append(job.kill(rank, needs_standby=False))
    return own, other, equal


def measure(rounds: int, kills: int, steps: int, save: str) -> Report:
    """All figures; each kill's seconds go to the file `save`, if it has a name."""
    random.seed(0)
    own, other, equal = play_kills(rounds, kills, steps)
    report = BENCH.report(of_kills(own, other, equal))
    if save:
        kept = {
            "machine": report["machine"],
            "ours": [[round(s, 4) for s in (k.seconds, *segments(k))] for k in own],
            "torchrun": [round(kill.seconds, 4) for kill in other],
        }
        Path(save).write_text(json.dumps(kept, indent=1) + "\n")
    return report


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, rounds=ROUNDS, kills=KILLS, steps=NUM_STEPS, save=""))
