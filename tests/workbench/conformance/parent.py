"""A parent process of its own, for tests that interrupt or kill it.

It prints `ready` once its ranks run, and how it ended if it was given the time to.
"""

from __future__ import annotations

import sys
import tempfile
import time

from distlab.runner import Cluster, Limits
from tests.workbench.conformance import misbehaviour


def main() -> None:
    tempfile.tempdir = sys.argv[2]  # so that the test can see what is left there
    with Cluster() as cluster:
        if sys.argv[1] == "together":
            for _ in range(3):
                run = cluster.run(misbehaviour.is_alone, 3)
                print(run.outcome, run.values, flush=True)
            return
        if sys.argv[1] == "idle":
            print(cluster.run(misbehaviour.hello, 2).outcome, flush=True)
            time.sleep(60)
        try:
            cluster.run(
                misbehaviour.sleeps_long,
                2,
                limits=Limits(seconds=60),
                on_report=lambda rank, value: print("ready", flush=True),
            )
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            again = cluster.run(misbehaviour.hello, 2)
            print(again.outcome, flush=True)


if __name__ == "__main__":
    main()
