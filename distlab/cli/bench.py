"""`distlab bench NAME`: run one of the benchmarks in `benchmarks/`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from distlab.cli.screen import show, stopped
from distlab.processes.tree import become_subreaper, descendants, end_descendants

_NO_FIGURES = {"ablation", "mutation", "soak"}  # they pass or fail
_PATIENCE_S = 10.0  # for a benchmark that was told to stop


def names(root: Path = Path(__file__).parents[2]) -> list[str]:
    """List the benchmarks of a checkout."""
    # What begins with _ belongs to a benchmark beside it; record_* measures nothing, it
    # makes the recorded runs of a task.
    found = {path.stem for path in (root / "benchmarks").glob("[!_]*.py")}
    return sorted(
        name for name in found - _NO_FIGURES if not name.startswith("record_")
    )


def bench(
    name: str,
    *,
    as_json: bool = False,
    corpus: bool = False,
    min_efficiency: float | None = None,
) -> int:
    """Run `benchmarks/NAME.py` of the checkout and return its exit code.

    Raises:
        ValueError: there is no such benchmark.
    """
    from distlab.curriculum import find_root

    root = find_root()
    known = names(root)
    if name not in known:
        raise ValueError(
            f"no benchmark is called {name!r}; choose one of {', '.join(known)}"
        )
    if corpus and name != "sim":
        raise ValueError(f"{name} has no corpus; only sim has one")
    if min_efficiency is not None and name != "scaling":
        raise ValueError(f"{name} has no efficiency; only scaling has one")
    path = root / "benchmarks" / f"{name}.py"
    command = [sys.executable, "-m", "distlab.cli.benched", str(path)]
    command += ["--json"] * as_json + ["--corpus"] * corpus
    if min_efficiency is not None:
        command += ["--min-efficiency", str(min_efficiency)]
    sign = (
        ""
        if as_json
        else f"measuring {name}, which takes minutes and needs a quiet machine"
    )
    if sign:
        show([("dim", sign)])
    become_subreaper()
    before = frozenset(descendants(os.getpid()))
    # In a group of its own: Ctrl-C in the terminal reaches us, and we pass it on to
    # the benchmark alone, or each process that it started would say something.
    process = subprocess.Popen(command, process_group=0)
    try:
        return process.wait()
    except KeyboardInterrupt:
        _stop(process)
        end_descendants(spare=before)
        return stopped()


def _stop(process: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
