"""`distlab bench NAME`: measure a figure; what is measured lives in `benchmarks/`."""

from __future__ import annotations

import subprocess
import sys

from distlab.cli.screen import show
from distlab.curriculum import find_root

_NO_FIGURES = {"ablation", "soak"}  # make targets: they pass or fail


def bench(name: str, *, as_json: bool = False, corpus: bool = False) -> int:
    """Run `benchmarks/NAME.py` of the checkout and return its exit code.

    Raises:
        ValueError: there is no such benchmark.
    """
    folder = find_root() / "benchmarks"
    # What begins with _ belongs to a benchmark beside it.
    found = {path.stem for path in folder.glob("[!_]*.py")}
    known = sorted(found - _NO_FIGURES)
    if name not in known:
        raise ValueError(
            f"no benchmark is called {name!r}; there is {', '.join(known)}"
        )
    if corpus and name != "sim":
        raise ValueError(f"{name} has no corpus, only sim has")
    command = [sys.executable, str(folder / f"{name}.py")]
    command += ["--json"] * as_json + ["--corpus"] * corpus
    sign = "" if as_json else f"measuring {name}; minutes, best on a quiet machine"
    if sign:
        show([("dim", sign)])
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the benchmark heard it too, and stops what it started
