"""The units beside torch: a table of cases, each with the largest difference.

Each unit's cases are in `tests/corpora/beside_torch`. 1 if one is larger than rounding.

    python benchmarks/beside_torch.py [--unit ddp|zero] [--only TEXT] [--json]
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from benchmarks._bars import Bench, Line
from distlab.runner import Cluster

TOLERANCE = 1e-11
UNITS = ("ddp", "library", "zero")
BENCH = Bench("beside_torch", __doc__)


def measure(unit: str = "", only: str = "") -> list[Line]:
    """The cases of a unit, or of all, with `only` in their names."""
    lines = []
    for name in [unit] if unit else UNITS:
        module = importlib.import_module(f"tests.corpora.beside_torch.{name}")
        with Cluster(preload=("torch._dynamo", module.__name__)) as cluster:
            for case in module.cases():
                if only in case.name:
                    lines.append(line_of(name, case, cluster))
    return lines


def line_of(unit: str, case: Any, cluster: Cluster) -> Line:
    """The largest difference of a case; None if it is not finite, or an error came."""
    try:
        value, why = float(case.largest(cluster)), []
    except AssertionError as error:
        value, why = math.inf, [str(error)]
    name = f"{unit}, {case.num_ranks} ranks, {case.name}"
    bars = Bench(BENCH.name, None, at_most={name: TOLERANCE})
    found = value if math.isfinite(value) else None
    return bars.line(name, found, num_ranks=case.num_ranks, what=why)


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, unit=UNITS, only=""))
