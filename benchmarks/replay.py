"""Does replay name a mistake as well as the judges' own suspects do?

Each wrong solution of the catalogue is judged, and its record compared with those of
the others of its task and with its own:

    python benchmarks/replay.py [--json] [TASK…]

    same      the others give the name that the judge gave
    other     the others give another name
    none      the judge has a name, the others have not
    new       the judge has none, the others have
    itself    its own replay on the kernel gives the same record
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the program by name

from benchmarks._replay import alike  # noqa: E402
from distlab.curriculum import Curriculum, find_root, load_curriculum  # noqa: E402
from distlab.grading.catalogue import Entry, read_catalogue  # noqa: E402
from distlab.grading.clause import checks_of  # noqa: E402
from distlab.grading.harness import Implementation, PlayedRuns  # noqa: E402
from distlab.grading.mutants import SEED  # noqa: E402
from distlab.grading.preflight import look_at  # noqa: E402
from distlab.grading.verdict import NotJudgedError, NotYetError  # noqa: E402
from distlab.runner import Cluster, Limits  # noqa: E402

TASKS = (
    "collectives.all_reduce",
    "tensor_parallel.vocab_loss",
    "sharded_optimizer.stage1",
)


def outcome(
    curriculum: Curriculum, cluster: Cluster, entry: Entry, folder: Path
) -> tuple[str, str, str, bool]:
    """How replay fares: outcome, the judge's name, its own, and whether it is exact."""
    unit = curriculum.units[entry.task.partition(".")[0]]
    path = folder / f"{entry.id}_{unit.name}.py"
    path.write_text(entry.applied_to(unit.solution(curriculum.root).read_text()))
    task = curriculum.task(entry.task)
    _, ready = look_at(curriculum, task, str(path))
    if ready is None:
        return "not a matter of values", entry.slug, "", False
    impl = Implementation(ready.source, ready.reference)
    check = next(c for c in checks_of(task.id) if c.clause == entry.clause)
    runs = PlayedRuns(cluster, impl, check.worlds[0], SEED, Limits(seconds=10))
    with contextlib.suppress(NotYetError, NotJudgedError):
        check.judge(runs)
    if runs.latest is None or runs.latest[1].outcome != "finished":
        return "not a matter of values", entry.slug, "", False
    found = alike(task.id, *runs.latest, runs, curriculum)
    slugs = {other.slug for other in found if other.id != entry.id}
    own = slugs.pop() if len(slugs) == 1 else ""
    exact = any(other.id == entry.id for other in found)
    if own == entry.slug:
        return ("same" if own else "no name, rightly"), entry.slug, own, exact
    kind = "new" if not entry.slug else "other" if own else "none"
    return kind, entry.slug, own, exact


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    curriculum = load_curriculum(find_root())
    report: dict[str, Any] = {}
    with Cluster() as cluster, tempfile.TemporaryDirectory() as name:
        for task in options.tasks:
            count: Counter[str] = Counter()
            rows = []
            for entry in read_catalogue(curriculum, unit=task.partition(".")[0]):
                if entry.task == task and entry.is_mutant:
                    found = outcome(curriculum, cluster, entry, Path(name))
                    count[found[0]] += 1
                    count["itself"] += found[3]
                    rows.append([entry.id, *found])
            report[task] = {"counts": dict(count), "rows": rows}
            if not options.json:
                print(task, dict(count))
                for row in rows:
                    if row[1] in ("other", "new", "none"):
                        print("   ", *row)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
