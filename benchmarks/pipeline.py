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

import math
import sys
from functools import partial
from types import ModuleType

import torch

from benchmarks._bars import Bench, Line
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
BENCH = Bench("pipeline", __doc__, at_least=AT_LEAST, at_most=AT_MOST)


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


def results_of(unit: ModuleType, stages: int, microbatches: int) -> list[Line]:
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
        seen: Line = {"time_s": took_s, "formula_s": formula_s, "peaks": peaks[label]}
        note = f"{1000 * took_s:.0f} ms; kept at most: {peaks[label]}"
        value = rel_err(took_s, formula_s)
        lines.append(BENCH.line(f"{label}_rel_err", value, note=note, **seen))
    enough = [min(stages - rank, microbatches) for rank in range(stages)]
    is_ok = all(kept <= most for kept, most in zip(peaks["f1b"], enough, strict=True))
    lines.append(BENCH.line("f1b_peak_activations_ok", int(is_ok), enough=enough))
    return lines


def measure(stages: int, microbatches: int) -> list[Line]:
    """All figures of the reference."""
    return results_of(load("pipeline_parallel", "reference"), stages, microbatches)


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, stages=8, microbatches=32))
