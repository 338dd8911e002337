"""The units beside torch: a table of cases, each with the largest difference.

Each unit's cases are in `tests/corpora/beside_torch`. 1 if one is larger than rounding.

    python benchmarks/beside_torch.py [--unit ddp|zero] [--only TEXT] [--json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from distlab.runner import Cluster  # noqa: E402

TOLERANCE = 1e-11
UNITS = ("ddp", "library", "zero")


def main() -> int:
    """Play all cases, print the table, and say whether every difference is rounding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", choices=UNITS, help="all without it")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for unit in [options.unit] if options.unit else UNITS:
        module = importlib.import_module(f"tests.corpora.beside_torch.{unit}")
        with Cluster(preload=("torch._dynamo", module.__name__)) as cluster:
            for case in module.cases():
                if options.only in case.name:
                    results.append(_play(unit, case, cluster))
                    if not options.json:
                        print(_row(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"bench": "beside_torch", "results": results}, indent=1))
    else:
        num_met = sum(result["is_met"] for result in results)
        print(f"{num_met} of {len(results)} are equal to rounding")
    return int(not all(result["is_met"] for result in results))


def _play(unit: str, case: Any, cluster: Cluster) -> dict[str, Any]:
    result = {"unit": unit, "name": case.name, "num_ranks": case.num_ranks}
    try:
        value, why = float(case.largest(cluster)), ""
    except AssertionError as error:
        value, why = math.inf, str(error)
    return {
        **result,
        "value": value if math.isfinite(value) else None,
        "bar": TOLERANCE,
        "is_met": value <= TOLERANCE,
        **({"why": why} if why else {}),
    }


def _row(result: dict[str, Any]) -> str:
    value = "     inf" if result["value"] is None else f"{result['value']:8.1e}"
    row = f"{result['unit']:<5} {result['num_ranks']} ranks  {value}  {result['name']}"
    return row + (f"\n{result['why']}" if "why" in result else "")


if __name__ == "__main__":
    sys.exit(main())
