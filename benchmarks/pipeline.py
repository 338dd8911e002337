"""Pipelines in virtual time: the reference's schedules and executor, and the formulas.

    distlab bench pipeline [--json]        exits with 1 when a bar is missed
    python benchmarks/pipeline.py [--stages 8] [--microbatches 32] [--json]

Each stage takes 1 ms forward and 2 ms backward per microbatch, messages take no time:

    GPipe, 1F1B         (m + p - 1) (t_f + t_b)
    interleaved, v = 2  (m v + p - 1) (t_f + t_b), of one chunk

Beside it, what 1F1B keeps: stage r has the graphs of p - r microbatches at most, and
not of all m. A graph counts from its forward until nothing refers to it any more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch

from distlab.curriculum.units import load
from distlab.grading.checks.pipeline_parallel.race import (
    BACKWARD_MS,
    FORWARD_MS,
    CountedStage,
    Meter,
    Timed,
)
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, run
from distlab.sim.plans import closed_forms as forms

FREE = AlphaBeta(alpha_s=0.0, bytes_per_s=math.inf)
CHUNKS = 2  # of the interleaved one, on each rank
FORWARD_S, BACKWARD_S = FORWARD_MS / 1000, BACKWARD_MS / 1000
AT_MOST = {"gpipe_rel_err": 0.0, "f1b_rel_err": 0.0, "interleaved_rel_err": 1e-9}
AT_LEAST = {"f1b_peak_activations_ok": 1}
Line = dict[str, Any]


def one_batch(
    context: RankContext, unit: ModuleType, name: str, num_microbatches: int
) -> int:
    """What one rank does; the most graphs that it had to keep."""
    chunks = CHUNKS if name == "interleaved" else 1
    more = (chunks,) if name == "interleaved" else ()
    rank, n = context.rank, context.world_size
    schedule = getattr(unit, name)(rank, n, num_microbatches, *more)
    x, meter = torch.ones(1, 1, dtype=torch.float64), Meter()
    stages = [CountedStage(Timed(context.clock.sleep), meter) for _ in range(chunks)]
    unit.execute(
        context.comm,
        [unit.ModelChunk(stage, x[0]) for stage in stages],
        schedule,
        lambda output, target: (output - target).square().mean(),
        [(x, x)] * num_microbatches,
    )
    return meter.peak


def simulated(
    unit: ModuleType, name: str, stages: int, microbatches: int
) -> tuple[float, list[int]]:
    """Virtual seconds until all ranks are done, and what each kept."""
    program = partial(one_batch, unit=unit, name=name, num_microbatches=microbatches)
    done = run(program, stages, net=FREE, journal=False)
    done.require_finished()
    return done.time_s, done.values


def rel_err(seconds: float, formula_s: float) -> float:
    """Apart from the formula, in whole picoseconds, as the simulator's clock goes."""
    took, formula = round(1e12 * seconds), round(1e12 * formula_s)
    return abs(took - formula) / formula


def result(name: str, value: float, **more: Any) -> Line:
    """One figure with its bar, if it has one."""
    line: Line = {"name": name, "value": value, "unit": "", **more}
    if name in AT_MOST:
        line |= {"bar": AT_MOST[name], "met": value <= AT_MOST[name]}
    if name in AT_LEAST:
        line |= {"bar": AT_LEAST[name], "met": value >= AT_LEAST[name]}
    return line


def measure(unit: ModuleType, stages: int, microbatches: int) -> list[Line]:
    """All results, for the schedules and the executor of `unit`."""
    times = FORWARD_S, BACKWARD_S
    plain_s = forms.gpipe_s(stages, microbatches, *times)
    chunked_s = forms.interleaved_s(stages, microbatches, CHUNKS, *times)
    plans = {
        "gpipe": ("gpipe", plain_s),
        "f1b": ("one_f_one_b", plain_s),
        "interleaved": ("interleaved", chunked_s),
    }
    lines, peaks = [], {}
    for label, (name, formula_s) in plans.items():
        took_s, peaks[label] = simulated(unit, name, stages, microbatches)
        seen = {"time_s": took_s, "formula_s": formula_s, "peaks": peaks[label]}
        lines.append(result(f"{label}_rel_err", rel_err(took_s, formula_s), **seen))
    enough = [min(stages - rank, microbatches) for rank in range(stages)]
    is_ok = all(kept <= most for kept, most in zip(peaks["f1b"], enough, strict=True))
    lines.append(result("f1b_peak_activations_ok", int(is_ok), enough=enough))
    return lines


def missed(lines: list[Line]) -> list[str]:
    """The names of the results that miss their bar."""
    return [line["name"] for line in lines if not line["met"]]


def text(lines: list[Line]) -> list[str]:
    """What is printed without --json."""
    told = []
    for line in lines:
        bar = "" if line["met"] else f"  MISSED, the bar is {line['bar']}"
        told.append(f"{line['name']:<24} {line['value']:>6g}{bar}")
        if "time_s" in line:
            kept = " ".join(map(str, line["peaks"]))
            told.append(f"    {1000 * line['time_s']:.0f} ms; kept at most: {kept}")
    return told


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unit = load("pipeline_parallel", "reference")
    lines = measure(unit, options.stages, options.microbatches)
    if options.json:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__}
        report = {"bench": "pipeline", "machine": machine, "results": lines}
        print(json.dumps(report, indent=1))
    else:
        print(f"{options.stages} stages, {options.microbatches} microbatches")
        print("\n".join(text(lines)))
    return int(bool(missed(lines)))


if __name__ == "__main__":
    sys.exit(main())
