"""Any script on hundreds of simulated ranks: how long it takes here, and how exact.

The scripts in tests/corpora/simscript run as they are, each in a fresh process, twice:

    ddp_256_s, fsdp2_256_s, ddp_1024_s    processor seconds of one core
    fsdp2_256_mb                          the most memory that the process took
    fake_7b_256_s, fake_70b_1024_s        models that are larger than this machine
    …_step_s, …_formula_s, …_rel_err      a step in virtual time, and what it takes by
                                          formula: products, attention, and rings of
                                          alpha-beta messages, with nothing overlapped
    repeats                               the share of runs whose second run had the
                                          same figures, to the last digit

Processor seconds, because those don't depend on what else this machine does; the cores'
caches and hyper-threads do, so that a busy machine still costs up to a third.

distlab bench simscript [--json]     exits with 1 when a bar is missed
python benchmarks/simscript.py --only fake
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._bars import Bench, Line
from benchmarks._simscript_net import step_s
from tests.corpora.simscript.transformer import SIZES

BENCH = Bench(
    "simscript",
    __doc__,
    at_least={"repeats": 1.0},
    at_most={
        "ddp_256_s": 5.0,
        "fsdp2_256_s": 25.0,
        "fsdp2_256_mb": 1500.0,
        "ddp_1024_s": 40.0,
        "fake_7b_256_rel_err": 0.01,
        "fake_70b_1024_rel_err": 0.01,
    },
)


class Case(NamedTuple):
    """A script and its argument, on so many ranks."""

    name: str
    script: str
    arg: str
    ranks: int
    is_fake: bool


ROOT = Path(__file__).parents[1]
CASES = (
    Case("ddp_256", "small.py", "ddp", 256, False),
    Case("fsdp2_256", "small.py", "fsdp2", 256, False),
    Case("ddp_1024", "small.py", "ddp", 1024, False),
    Case("fake_7b_256", "transformer.py", "7b", 256, True),
    Case("fake_70b_1024", "transformer.py", "70b", 1024, True),
)


def played(case: Case) -> dict[str, Any]:
    """The figures of one run, in a process of its own.

    Raises:
        RuntimeError: it did not come to its end.
    """
    fake = "fake" if case.is_fake else "real"
    words = [
        "-m",
        "benchmarks._simscript_run",
        case.script,
        str(case.ranks),
        fake,
        case.arg,
    ]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines_of(case: Case, runs: Sequence[dict[str, Any]]) -> list[Line]:
    """The results of a case that was run several times; the best time counts."""
    tooks = [run["took"] for run in runs]
    seconds = [round(took["cpu_s"], 2) for took in tooks]
    peak = round(max(took["peak_mb"] for took in tooks), 1)
    lines = [
        BENCH.line(f"{case.name}_s", min(seconds), "CPU s", runs=seconds),
        BENCH.line(
            f"{case.name}_wall_s", round(min(t["wall_s"] for t in tooks), 2), "s"
        ),
        BENCH.line(f"{case.name}_mb", peak, "MB"),
    ]
    figures = runs[0]["figures"]
    step = figures["steps_s"][-1]
    lines.append(BENCH.line(f"{case.name}_step_s", step, "virtual s"))
    if case.is_fake:
        parts = step_s(SIZES[case.arg], case.ranks)
        formula = sum(parts.values())
        memory = figures["memory"]
        lines += [
            BENCH.line(f"{case.name}_formula_s", formula, "virtual s", **parts),
            BENCH.line(f"{case.name}_rel_err", abs(step / formula - 1), ""),
            BENCH.line(
                f"{case.name}_rank_gb", sum(memory.values()) / 1e9, "GB", **memory
            ),
        ]
    return lines


def measure(only: str = "", times: int = 2) -> list[Line]:
    """All figures of the cases whose names begin so, each run that often."""
    lines: list[Line] = []
    cases = [case for case in CASES if case.name.startswith(only)]
    alike = 0
    for case in cases:
        runs = [played(case) for _ in range(max(1, times))]
        alike += all(run["figures"] == runs[0]["figures"] for run in runs)
        lines += lines_of(case, runs)
    return [*lines, BENCH.line("repeats", alike / len(cases), "of runs", n=len(cases))]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, only="", times=2))
