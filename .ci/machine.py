"""How fast is this machine? Prints its slowness: 1.0 is what the budget was set on.

Machines differ by a factor of 2.5, and so does the time of every stage. One number for
both cores at once: interpreted code and forks, which is what the tests consist of.
"""

import os
import time

QUIET_S = 0.5  # on two cores of the machine that the estimates in `run` come from


def work() -> None:
    """What the tests consist of, without importing anything."""
    total = 0
    for number in range(12_000_000):
        total += number & 7
    for _ in range(200):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def measure() -> float:
    """Seconds that two processes need for the same work, side by side."""
    began = time.perf_counter()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(f"{min(measure() for _ in range(3)) / QUIET_S:.2f}")
