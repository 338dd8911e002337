"""Run the reference through the autograder again and again while the CPU is busy.

    python -m tests.soak --times 20

A verdict must not depend on how fast the machine is. Beside the graded ranks, one
process per core does nothing but count, so that ranks are scheduled late and in unusual
orders. Each run must end with exit code 0; the first that does not is shown whole. The
counting processes are children held by their handles: they are ended in every case, and
they end by themselves when this process has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

CHECK = (sys.executable, "-m", "distlab", "check", "--phase", "1")
REFERENCE = ("--code", "reference")

# Looking at the parent on every turn is load enough, and no orphan stays behind.
BUSY = "import os\nwhile os.getppid() == {parent}: pass"


@contextlib.contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Keep that many processes busy inside the `with` block."""
    code = BUSY.format(parent=os.getpid())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_processes):
            children.append(subprocess.Popen([sys.executable, "-c", code]))
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def soak(command: Sequence[str], times: int) -> int:
    """Run the command that often; returns how many runs did not exit with 0."""
    failed = 0
    for turn in range(1, times + 1):
        started = time.monotonic()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        print(f"{turn:3d}/{times}  exit {done.returncode}  {seconds:.1f} s", flush=True)
        if done.returncode != 0 and not failed:
            print(done.stdout)
        failed += done.returncode != 0
    return failed


def main() -> int:
    """Soak; returns 0 when every run passed."""
    parser = argparse.ArgumentParser(description="The reference, under CPU load.")
    parser.add_argument("--times", type=int, default=20, help="how many runs (20)")
    times = parser.parse_args().times
    num_busy = os.cpu_count() or 1
    # So that the `finally` above runs when we are asked to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with load(num_busy):
            print(f"{times} runs beside {num_busy} busy processes", flush=True)
            failed = soak([*CHECK, *REFERENCE], times)
    except KeyboardInterrupt:
        print("stopped by you")
        return 130
    print(f"{times - failed} of {times} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
