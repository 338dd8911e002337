"""torch's own DistributedDataParallel tests, on distlab's wrapper beside torch's.

    python benchmarks/torch_suite.py [--ranks 3] [--only TEXT] [--json]

A test applies if it passes on torch's wrapper on this machine: most of the others need
a GPU. Of those that apply, this counts which pass on ours, which ask for something that
ours doesn't offer, and which fail. Needs `pip install expecttest`, like torch's suite.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._bars import Bench, Report

CASE = Path(__file__).parents[1] / "tests" / "corpora" / "torch_suite_case.py"
ABOUT_DDP = re.compile(
    r"ddp|DistributedDataParallel|SyncBatchNorm|unused|undefined_grad|static_graph"
    r"|stateless|forward_backward_hook",
    re.IGNORECASE,
)
LIMIT_S = 240.0
BENCH = Bench("torch_suite", __doc__, at_most={"failed": 0})


def measure(ranks: int = 3, only: str = "") -> Report:
    """Run the suite on both wrappers; the tests with `only` in their names.

    Raises:
        SystemExit: torch's suite can't be imported.
    """
    if importlib.util.find_spec("expecttest") is None:
        raise SystemExit("torch's suite needs expecttest: pip install expecttest")
    rows = []
    for name in [name for name in names(ranks) if only in name]:
        row = {"test": name, **run(name, "torch", ranks)}
        if row["outcome"] == "passed":
            row = {"test": name, **run(name, "ours", ranks)}
        else:
            row["outcome"] = "does not apply"
        rows.append(row)
    counts = Counter(row["outcome"] for row in rows)
    lines = [
        BENCH.line(outcome.replace(" ", "_"), counts[outcome], "tests")
        for outcome in ("passed", "failed", "refused", "skipped", "does not apply")
    ]
    return BENCH.report(lines, tests=rows)


def table(report: Report) -> list[str]:
    """A line for each test, and why it did not pass."""
    return [
        f"{row['outcome']:15}{row['test']}  "
        + ("" if row["outcome"] == "passed" else last_line(row["text"]))
        for row in report["tests"]
    ]


def names(num_ranks: int) -> list[str]:
    """The tests of torch's suite that are about the wrapper."""
    out, said = case("--list", "torch", num_ranks)
    if not out:
        raise SystemExit(f"torch's suite can't be imported: {last_line(said)}")
    found: list[str] = json.loads(out.splitlines()[-1])
    return [name for name in found if ABOUT_DDP.search(name)]


def run(name: str, whose: str, num_ranks: int) -> dict[str, Any]:
    """The outcome of one test on `whose` wrapper, and its text."""
    try:
        out, said = case(name, whose, num_ranks)
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "text": f"no end within {LIMIT_S:.0f} s"}
    lines = [line for line in out.splitlines() if line.startswith('{"outcome"')]
    if not lines:
        return {"outcome": "failed", "text": said or out}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def case(argument: str, whose: str, num_ranks: int) -> tuple[str, str]:
    """What the case's process prints, on both streams.

    Raises:
        subprocess.TimeoutExpired: it was still running after LIMIT_S, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        environment = {
            **os.environ,
            "DISTLAB_SUITE": whose,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(num_ranks),
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, str(CASE), argument],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that no rank of it outlives a time limit
        )
        try:
            return process.communicate(timeout=LIMIT_S)
        except BaseException:  # also Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise


def last_line(text: str) -> str:
    """What an error ends with: the line that names it."""
    lines = [line.strip() for line in inspect.cleandoc(text).splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error)\b", line)]
    return ((errors or lines or [""])[-1])[:150]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, table, ranks=3, only=""))
