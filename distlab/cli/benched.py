"""Run a benchmark for `distlab bench`, so that Ctrl-C ends it silently."""

from __future__ import annotations

import os
import runpy
import sys

from distlab.processes.tree import die_with_parent, end_descendants


def main() -> None:
    """Run the script that the first argument names, with the arguments after it."""
    die_with_parent()
    path = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(path)  # as Python does it
    try:
        runpy.run_path(path, run_name="__main__")
    except KeyboardInterrupt:
        end_descendants()  # or multiprocessing waits for its own, which heard nothing
        sys.exit(130)


if __name__ == "__main__":
    main()
