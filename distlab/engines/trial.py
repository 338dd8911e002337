"""The process of one trial: calls the caller's function with what was drawn for it.

    python distlab/engines/trial.py JOB REPORTS ANSWERS

It writes a JSON line per report to one pipe, and reads from the other whether to go on.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path


class TrialStopped(BaseException):
    """The search has ended this trial."""


def reporter(reports: int, answers: int) -> Callable[[float], None]:
    """What the caller's function reports its loss with."""
    said = os.fdopen(reports, "w")
    heard = os.fdopen(answers)

    def report(loss: float) -> None:
        print(json.dumps({"loss": float(loss)}), file=said, flush=True)
        if heard.readline().strip() != "go":
            raise TrialStopped

    return report


def main(job: Path, reports: int, answers: int) -> int:
    """Run the trial; 0 also where the search has ended it."""
    with job.open("rb") as file:  # as distlab.engines.job, without torch
        sys.path += [one for one in pickle.load(file) if one not in sys.path]
        train_fn, parameters = pickle.load(file)
    report = reporter(reports, answers)
    try:
        loss = train_fn(parameters, report)
        if isinstance(loss, int | float):
            report(loss)
    except TrialStopped:
        pass
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
