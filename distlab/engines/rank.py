"""Run one rank: read the job, train, and write the outcome.

    python -m distlab.launch … distlab/engines/rank.py FOLDER

FOLDER contains everything that a rank needs to know.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

JOB, OUTCOME = "job.pickle", "outcome.pickle"


def error_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says in one line why it failed."""
    return folder / f"rank_{rank}.error"


def main(folder: Path) -> int:
    """Train the job in `folder` as the rank that the environment names."""
    from distlab.engines import job
    from distlab.engines.strategies import find_strategy, rank_of_launcher
    from distlab.engines.worker import train

    # Where a rank hangs: kill -USR1 writes every thread's stack into its log.
    faulthandler.register(signal.SIGUSR1)
    rank = rank_of_launcher()
    try:
        task = job.read(folder / JOB)
        outcome = train(task)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        said = first if isinstance(error, ValueError) else _named(error, first)
        error_file(folder, rank).write_text(said, encoding="utf-8")
        raise
    if rank == 0 or find_strategy(task.config.backend).has_replicas:
        own = folder / f"{OUTCOME}.{rank}"
        job.write(outcome, own)
        own.replace(folder / OUTCOME)
    return 0


def _named(error: Exception, said: str) -> str:
    return f"{type(error).__name__}: {said}"


if __name__ == "__main__":
    # This file's folder would come first, and its names hide those of libraries.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main(Path(sys.argv[1])))
