"""One run of `benchmarks/simscript.py`, in a process of its own: figures as JSON.

    python -m benchmarks._simscript_run SCRIPT RANKS FAKE [ARGS]

In a process of its own, because the peak of its memory is a figure.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from benchmarks._simscript_net import FLOPS_PER_S, NET, PER_NODE
from distlab.sim import SimRun
from distlab.sim.torch.played import default_cast
from distlab.sim.torch.script import Script, run_script

SCRIPTS = Path(__file__).parents[1] / "tests" / "corpora" / "simscript"


def main() -> None:
    """Run it, and print what it took here and what it would take there."""
    name, ranks, fake, *args = sys.argv[1:]
    world_size, is_fake = int(ranks), fake == "fake"
    script = Script(str(SCRIPTS / name), tuple(args))
    wall, cpu = time.perf_counter(), time.process_time()
    done: SimRun = run_script(
        script,
        world_size,
        per_node=PER_NODE,
        net=NET,
        flops_per_s=FLOPS_PER_S,
        fake=is_fake,
        played=default_cast(world_size, PER_NODE) if is_fake else None,
    )
    done.require_finished()
    took = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    figures = {
        "steps_s": json.loads(done.ranks[0].output.splitlines()[-1]),
        "time_s": done.seconds,
        "calls": sum(len(record.journal) for record in done.ranks),
    }
    if is_fake:
        figures |= {"memory": dict(done.memory[0]), "unlike": done.unlike}
    print(json.dumps({"took": took, "figures": figures}))


if __name__ == "__main__":
    main()
