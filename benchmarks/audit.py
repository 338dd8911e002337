"""How many planted mistakes `distlab audit` names with their line, and what else.

The scripts in `tests/corpora/audited/wrong` have one mistake each, written after public
reports; the lines that a reviewer would point at end in `# MISTAKE`. Those in `right`
have none. Those whose number is above 20 were written after the detectors, and are
counted on their own too; the README there says how many were named at first sight.

    distlab bench audit [--json]        exits with 1 when a bar is missed
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._bars import Bench, Line, share
from distlab.audit import AuditReport, audit
from distlab.audit.run import PRELOAD
from distlab.runner import Cluster

FOLDER = Path(__file__).parents[1] / "tests" / "corpora" / "audited"
WRONG, RIGHT = FOLDER / "wrong", FOLDER / "right"
NUM_SEEN = 20  # scripts that were there before the detectors were done
BENCH = Bench(
    "audit",
    __doc__,
    at_least={"named": 0.95, "named_held_out": 0.95, "wrong": 40, "right": 40},
    at_most={"false_findings": 0},
)


def expected(script: Path) -> tuple[str, set[int]]:
    """Return the name of a script's mistake and the lines that are marked."""
    text = script.read_text(encoding="utf-8")
    name = re.search(r"^Finds: (\S+)$", text, re.MULTILINE)
    lines = text.splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith("# MISTAKE")}
    return (name[1] if name else ""), marked


def is_named(script: Path, report: AuditReport) -> bool:
    """Return True if the mistake was found: its name, on a marked line."""
    name, lines = expected(script)
    return any(f.name == name and f.at.line in lines for f in report.findings)


def others(script: Path, report: AuditReport) -> list[str]:
    """Return the findings besides the planted one, notes aside."""
    name, _ = expected(script)
    found = [f for f in report.findings if f.name != name and not f.is_note]
    return [f"{f.at} {f.name}: {f.said}" for f in found]


def run(
    scripts: Iterable[Path], cluster: Cluster
) -> list[tuple[Path, AuditReport, float]]:
    """Audit each script on 4 ranks, in a folder that takes what it writes."""
    done = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for script in scripts:
            started = time.monotonic()
            report = audit(script, cluster=cluster)
            done.append((script, report, time.monotonic() - started))
    return done


def measure(
    wrong: Sequence[Path] | None = None, right: Sequence[Path] | None = None
) -> list[Line]:
    """Return all figures; of these scripts, or of all."""
    with Cluster(preload=PRELOAD) as cluster:
        bad = run(sorted(WRONG.glob("*.py")) if wrong is None else wrong, cluster)
        good = run(sorted(RIGHT.glob("*.py")) if right is None else right, cluster)
    named = {script: is_named(script, report) for script, report, _ in bad}
    missed = [
        f"{s.name}: {expected(s)[0]} not named; {others(s, report)}"
        for s, report, _ in bad
        if not named[s]
    ]
    held_out = [is_it for s, is_it in named.items() if int(s.name[:2]) > NUM_SEEN]
    false = [f"{s.name}: {what}" for s, report, _ in good for what in others(s, report)]
    seconds = [took_s for _, _, took_s in bad + good]
    mean_s = round(sum(seconds) / len(seconds), 2) if seconds else 0.0
    return [
        BENCH.line("wrong", len(bad)),
        BENCH.line("named", share([*named.values()]), what=missed),
        BENCH.line("named_held_out", share(held_out)),
        BENCH.line("other_findings", sum(len(others(s, r)) for s, r, _ in bad)),
        BENCH.line("right", len(good)),
        BENCH.line("false_findings", len(false), what=false),
        BENCH.line("seconds_per_script", mean_s, "s"),
    ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure))
