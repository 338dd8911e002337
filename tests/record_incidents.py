"""Record the runs of 4.12: four real ranks train, and one fault is injected.

    python -m tests.record_incidents [--only killed] [--out FOLDER]

distlab/chaos/incidents.py says how. What was injected is kept beside what was seen;
4.12's function gets reports and events only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from distlab.chaos.incidents import PAUSE, InjectedFault, played
from distlab.data.make import make
from distlab.given import drill as given
from distlab.processes.tree import become_subreaper, end_descendants

FOLDER = Path(__file__).parents[1] / "phase4_production" / "incidents"
FAULTS = {
    "healthy": InjectedFault(given.NOTHING),
    "pause": InjectedFault(PAUSE, 2, 9),
    "killed": InjectedFault(given.KILLED, 2, 13),
    "killed_rank_0": InjectedFault(given.KILLED, 0, 11),
    "killed_and_torn": InjectedFault(given.KILLED, 1, 12, torn=(3, 10)),
    "data_worker": InjectedFault(given.DATA_WORKER, 2, 14),
    "frozen": InjectedFault(given.FROZEN, 1, 12),
    "slow": InjectedFault(given.SLOW, 3, 9),
    "nan": InjectedFault(given.NAN, 1, 8),
    "desync": InjectedFault(given.DESYNC, 2, 7),
    "torn": InjectedFault(given.TORN, 3, 15, torn=(3, 15)),
}


def record(name: str, out: Path, data: Path) -> Path:
    """Run the ranks with a fault; what they and the agent wrote, from time 0."""
    fault = FAULTS[name]
    reports, events = played(fault, data)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(_text(fault, reports, events), encoding="utf-8", newline="\n")
    return path


def _text(fault: InjectedFault, reports: list[Any], events: list[Any]) -> str:
    """JSON with a line for each report and event."""
    lists = {"reports": reports, "events": events}
    parts = [f'"injected": {json.dumps(fault._asdict())}']
    for name, rows in lists.items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    """Record all runs, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(FOLDER))
    parser.add_argument("--only", choices=FAULTS, action="append")
    options = parser.parse_args()
    become_subreaper()
    try:
        with tempfile.TemporaryDirectory(prefix="distlab-incident-") as temporary:
            data = Path(temporary) / "digits"
            make(data, "digits")
            for name in options.only or FAULTS:
                print(record(name, Path(options.out), data), flush=True)
    finally:
        end_descendants()


if __name__ == "__main__":
    main()
