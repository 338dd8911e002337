"""The learner's file as the program that torchrun starts, where `import distlab` fails.

torchrun's own agent (torch.distributed.elastic) runs in a warm process and forks the
workers from it, so that none of them waits for torch to be imported. In all else they
are what the command starts: its variables, its rendezvous, its exit codes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from distlab.grading.checks.trainer.main_reference import right_weights
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import close
from distlab.grading.runs import Runs, RunSpec
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

EPOCHS = 3  # main's default
WEIGHTS = "weights.pt"  # path's default
SEED_OF_NEW_PROCESS = 67280421310721  # torch's default_rng_seed_val
NO_DISTLAB = "there is no distlab here: it must run with torch alone"


def under_torchrun(
    context: RankContext, name: str, text: str, world_size: int
) -> dict[str, Any]:
    """Start the file on `world_size` workers; how they ended, and what was saved."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    Path(name).write_text(text, encoding="utf-8")
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        # Port 0: any that is free, as with --standalone, but by number and not by name.
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id="none",
        max_restarts=0,
        start_method="fork" if has_fork else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=os.path.abspath("logs")),
    )
    status = 0
    try:
        elastic_launch(config, as_program)(name)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
    state = None
    if os.path.exists(WEIGHTS):
        with suppress(Exception):  # then it is not what the reference saves
            state = flat(torch.load(WEIGHTS, weights_only=True))
    return {"status": status, "saved": os.path.exists(WEIGHTS), "state": state}


def as_program(name: str) -> None:
    """In a worker: run the file as `python name` would, where there is no distlab."""
    for module in [m for m in sys.modules if m.partition(".")[0] == "distlab"]:
        del sys.modules[module]
    sys.meta_path.insert(0, _NoDistlab())
    sys.argv, sys.path[:0] = [name], [os.getcwd()]
    torch.manual_seed(SEED_OF_NEW_PROCESS)
    random.seed()
    np.random.seed()
    try:
        runpy.run_path(name, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class _NoDistlab(MetaPathFinder):
    """Finds nothing, and says so for one package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name.partition(".")[0] == "distlab":
            raise ImportError(NO_DISTLAB)


def expect_clean_end(runs: Runs, spec: RunSpec) -> None:
    """Have the workers end with 0, and rank 0 save the right weights.

    Raises:
        NotYetError: they did not, or it did not.
    """
    run = runs.ended(spec)
    if run.outcome != "finished" or run.values[0]["status"]:
        raise _failed(run, runs.source.path.name)
    if not run.values[0]["saved"]:
        raise NotYetError(
            f"under torchrun, main() wrote no {WEIGHTS}, expected this file, the "
            "default of path",
            rule="the line at the end of the file calls main() without arguments",
        )
    state = run.values[0]["state"]
    if state is None or not close(state, right_weights(EPOCHS, whole=True)):
        raise NotYetError(
            "under torchrun, the saved weights are wrong, though the same main was "
            "right in the grader's ranks",
            rule="the weights may depend only on rank, world size and epoch",
        )


def _failed(run: Run, script: str) -> NotYetError:
    said = run.ranks[0].output
    if run.outcome == "finished":
        how = f"failed with exit status {run.values[0]['status']}"
    elif run.outcome == "timeout":
        how = f"had not ended after {run.seconds:.0f} s"
    else:
        error = run.ranks[0].error
        how = f"could not be started: {error.message if error else run.outcome}"
    block = _own_traceback(said, script)
    reason = f": {block[-1][:200]}" if block else ""
    no_distlab = NO_DISTLAB in reason
    return NotYetError(
        f"under torchrun, the program {how}{reason}",
        slug="still-needs-distlab" if no_distlab else "",
        rule="main uses torch.distributed in place of comm" if no_distlab else "",
        output="\n".join(block or said.splitlines()[-30:]),
        fatal=True,
    )


def _own_traceback(said: str, script: str) -> list[str]:
    """The first traceback that comes from the file itself: torchrun has its own."""
    lines = said.splitlines()
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" not in line:
            continue
        prefix = line[: line.index("Traceback")]
        block = [line.removeprefix(prefix)]
        for following in lines[number + 1 :]:
            block.append(following.removeprefix(prefix))
            if block[-1] and not block[-1].startswith(" "):
                break
        if any(f'{script}"' in part for part in block):
            return block
    return []
