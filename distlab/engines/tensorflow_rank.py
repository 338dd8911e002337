"""Run a user's script as one rank of TensorFlow, with the strategy already open.

    python -m distlab.launch … distlab/engines/tensorflow_rank.py any SCRIPT …

With nccl in place of any, TensorFlow sends by NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # This file's folder would come first, and its names hide those of libraries.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from distlab.engines.expect import EngineError
from distlab.engines.start import job_of_launcher, run_here
from distlab.engines.tensorflow_start import open_strategy


def main(wire: str, script: Path, arguments: Sequence[str]) -> int:
    """Run `script` as the rank that the environment names; return the exit code."""
    with job_of_launcher():
        try:
            open_strategy("nccl" if wire == "nccl" else None)
        except EngineError as error:
            print(f"distlab train: {error}", file=sys.stderr)
            return 1
        return run_here(script, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
