"""The log of a rank: a line for each event, in a file that outlives the rank.

Each line is a single write, so a rank that is killed leaves only whole lines.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

LAUNCH = "DISTLAB_CHAOS_LAUNCH"


class Ledger:
    """The log of this process.

    `generation` counts how often a launcher has started the ranks, and LAUNCH counts
    the launchers.
    """

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self._file = os.open(
            folder / f"ledger.{os.getpid()}.jsonl",
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            0o600,
        )
        launch = int(os.environ.get(LAUNCH, "1"))
        self._head = {"rank": rank, "launch": launch, "generation": generation}

    def write(self, what: str, **more: Any) -> None:
        """Record an event that happens now; `more` may name another rank."""
        line = {"what": what, "t": time.monotonic(), **self._head, **more}
        os.write(self._file, f"{json.dumps(line)}\n".encode())


def read_ledgers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all ranks in the order of their times."""
    lines = []
    for path in sorted(folder.glob("ledger.*.jsonl")):
        lines += [json.loads(text) for text in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: float(line["t"]))
