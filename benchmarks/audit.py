"""How many planted mistakes `distlab audit` names with their line, and what else.

The scripts in `tests/corpora/audited/wrong` have one mistake each, written after public
reports; the lines that a reviewer would point at end in `# MISTAKE`. Those in `right`
have none. Those whose number is above 20 were written after the detectors, and are
counted on their own too; the README there says how many were named at first sight.

    distlab bench audit [--json]        exits with 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._bars import Bars, Line, report_of, rows, share, show  # noqa: E402
from distlab.audit import Report, audit  # noqa: E402
from distlab.audit.run import PRELOAD  # noqa: E402
from distlab.runner import Cluster  # noqa: E402

FOLDER = ROOT / "tests" / "corpora" / "audited"
WRONG, RIGHT = FOLDER / "wrong", FOLDER / "right"
NUM_SEEN = 20  # scripts that were there before the detectors were done
BARS = Bars(
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


def is_named(script: Path, report: Report) -> bool:
    """Return True if the mistake was found: its name, on a marked line."""
    name, lines = expected(script)
    return any(f.name == name and f.at.line in lines for f in report.findings)


def others(script: Path, report: Report) -> list[str]:
    """Return the findings besides the planted one, notes aside."""
    name, _ = expected(script)
    found = [f for f in report.findings if f.name != name and not f.is_note]
    return [f"{f.at} {f.name}: {f.said}" for f in found]


def run(scripts: Iterable[Path], cluster: Cluster) -> list[tuple[Path, Report, float]]:
    """Audit each script on 4 ranks, in a folder that takes what it writes."""
    done = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for script in scripts:
            started = time.monotonic()
            report = audit(script, cluster=cluster)
            done.append((script, report, time.monotonic() - started))
    return done


def measure(wrong: Sequence[Path], right: Sequence[Path]) -> dict[str, Any]:
    """Return all results, in the schema of every benchmark here."""
    with Cluster(preload=PRELOAD) as cluster:
        bad, good = run(wrong, cluster), run(right, cluster)
    missed = [(s, r) for s, r, _ in bad if not is_named(s, r)]
    held_out = [(s, r) for s, r, _ in bad if int(s.name[:2]) > NUM_SEEN]
    false = [f"{s.name}: {what}" for s, r, _ in good for what in others(s, r)]
    lines = [
        BARS.line("wrong", len(bad)),
        BARS.line(
            "named", share([is_named(s, r) for s, r, _ in bad]), what=_told(missed)
        ),
        BARS.line("named_held_out", share([is_named(s, r) for s, r in held_out])),
        BARS.line("other_findings", sum(len(others(s, r)) for s, r, _ in bad)),
        BARS.line("right", len(good)),
        BARS.line("false_findings", len(false), what=false),
        BARS.line("seconds_per_script", _mean([t for _, _, t in bad + good]), "s"),
    ]
    return report_of("audit", lines)


def _mean(seconds: Sequence[float]) -> float:
    return round(sum(seconds) / len(seconds), 2) if seconds else 0.0


def _told(missed: Sequence[tuple[Path, Report]]) -> list[str]:
    return [
        f"{script.name}: {expected(script)[0]} not named; {others(script, report)}"
        for script, report in missed
    ]


def text(results: Sequence[Line]) -> list[str]:
    """Return what is printed without --json."""
    return rows(
        results,
        lambda line: (
            f"{line['name']:<20} {line['value']:>8} {line['unit']}{BARS.told(line)}"
        ),
    )


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure(sorted(WRONG.glob("*.py")), sorted(RIGHT.glob("*.py")))
    return show(report, text, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
