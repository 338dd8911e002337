"""Break `distlab` in small ways, one at a time: the fast tests must notice.

    python -m tests.mutation [--count 300] --out before.json
    python -m tests.mutation --replay before.json --out after.json --repo X

First each file of tests is run once, to see which functions each test executes, also in
the ranks. Then each mutant meets the tests that execute its function, up to the first
that fails. A replay asks again only what a test killed that has changed since.

It writes the mutants into the checkout and restores it: nothing may be uncommitted. A
run that was interrupted goes on where it was. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutation.choosing import Tests
from tests.mutation.mutants import Mutant, Place, all_places, draw, mutant_of

ROOT = Path(__file__).parents[2]

Record = dict[str, Any]


class Results:
    """What became of the mutants, kept after each."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.records: list[Record] = []
        if out.exists():
            self.records = json.loads(out.read_text())
        self._known = {mutant_of(record) for record in self.records}

    def __contains__(self, mutant: Mutant) -> bool:
        return mutant in self._known

    def add(self, mutant: Mutant, line: int, outcome: Record) -> None:
        """Keep it, and tell."""
        record = {**asdict(mutant), "line": line, **outcome}
        self.records.append(record)
        self._known.add(mutant)
        draft = self._out.with_suffix(".draft")
        draft.write_text(json.dumps(self.records, indent=1))
        draft.replace(self._out)
        where = f"{mutant.file}:{line}"
        print(f"{record['outcome']:8} {where:44} {mutant.kind:12} {record['by']}")
        sys.stdout.flush()

    def forget(self, tests: set[str]) -> None:
        """Drop what these tests killed."""
        self.records = [r for r in self.records if r["by"] not in tests]
        self._known = {mutant_of(record) for record in self.records}

    def summary(self) -> Record:
        """How many were killed: in all, by kind and by room."""
        rates: dict[str, Counter[str]] = defaultdict(Counter)
        for record in self.records:
            room = record["file"].split("/")[1]
            for name in ("all", record["kind"], f"distlab/{room}"):
                rates[name][record["outcome"]] += 1
        return {name: dict(rates[name]) for name in sorted(rates)}


def measure(tests: Tests, results: Results, count: int, end: float) -> None:
    """Meet new mutants until the time is over."""
    tests.learn()
    for number, place in enumerate(draw(all_places(tests.repo), count), 10**9):
        if place.mutant not in results and time.monotonic() < end:
            outcome = tests.meet(place, number, *tests.choose(place.mutant))
            results.add(place.mutant, place.line, outcome)


def replay(tests: Tests, results: Results, before: list[Record], end: float) -> None:
    """Meet again what a test killed that has changed: that test first, then others."""
    now = {place.mutant: place for place in all_places(tests.repo)}
    late: list[tuple[Place, int]] = []
    for number, record in enumerate(before, 10**9):
        mutant, by = mutant_of(record), record["by"]
        place = now.get(mutant)
        old = {name: record[name] for name in ("outcome", "by", "digest", "seconds")}
        same = tests.digest(by.partition("::")[0]) == record["digest"]
        if mutant in results:
            continue
        if place is None:
            results.add(mutant, record["line"], {**old, "outcome": "gone"})
        elif (
            record["outcome"] != "killed"
            or by == "crash"
            or (record["digest"] and same)
        ):
            results.add(mutant, place.line, old)
        elif not (tests.repo / by.partition("::")[0]).exists() or (
            "::" not in by or by in tests.distrusted
        ):
            late.append((place, number))
        elif (again := tests.meet(place, number, [by]))["outcome"] == "killed":
            results.add(mutant, place.line, again)
        else:
            late.append((place, number))
    if late:
        tests.learn()
    for place, number in late:
        if time.monotonic() < end:
            outcome = tests.meet(place, number, *tests.choose(place.mutant))
            results.add(place.mutant, place.line, outcome)


def main() -> int:
    """Measure, or replay, and say how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, required=True, help="goes on if it exists")
    parser.add_argument("--replay", type=Path, help="what --out of another run kept")
    parser.add_argument("--count", type=int, default=300, help="of mutants")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", action="store_true", help="the rates as JSON")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    repo, results = options.repo.resolve(), Results(options.out)
    known = options.out.with_suffix(".map.json")
    if options.replay and not known.exists():
        shutil.copy(options.replay.with_suffix(".map.json"), known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the file is restored
    changes = subprocess.check_output(["git", "diff", "HEAD", "--name-only"], cwd=repo)
    if changes:
        parser.error(f"{repo} has changes that are not committed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        tests = Tests(repo, Path(scratch), known)
        try:
            before = json.loads(options.replay.read_text()) if options.replay else []
            trusted = {(r["by"], r["digest"]) for r in before}
            wrong = {""}
            while wrong:
                if options.replay:
                    replay(tests, results, before, end)
                else:
                    measure(tests, results, options.count, end)
                killers = {(r["by"], r["digest"]) for r in results.records}
                nodes = {by for by, _ in killers - trusted if "::" in by}
                wrong = tests.distrust(sorted(nodes))
                results.forget(wrong)
                trusted |= killers
        finally:
            tests.close()
    summary = results.summary()
    if options.json:
        print(json.dumps(summary, indent=1))
    for name, counts in summary.items() if not options.json else ():
        killed, every = counts.get("killed", 0), sum(counts.values())
        print(f"{name:24} {killed:4} of {every:4} killed  {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
