"""`python -m distlab.run`: the launcher with --explain-hangs, or a rank of another one.

    distlab run -n 4 train.py --lr 0.1
    torchrun --nproc-per-node 4 -m distlab.run train.py --lr 0.1
    srun python -m distlab.run train.py --lr 0.1

Where another launcher has started the ranks, the script runs in this process, and the
first rank judges.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distlab.launch.__main__ import main as launch
from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.slurm import rank_environment
from distlab.search_order import put_last

BAD_USAGE = 2
_SETTINGS = ("on_hang", "no_progress", "hang_report", "hang_stacks")


def main(arguments: list[str]) -> int:
    """Run a script as the command line says; return the exit code."""
    os.environ.update(rank_environment(os.environ))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _as_rank(arguments)
    return launch(["--explain-hangs", *arguments], "distlab run")


def _as_rank(arguments: list[str]) -> int:
    from distlab.launch.arguments import USAGE, HelpAsked, parse
    from distlab.recorder.attach import attach

    try:
        line = parse(arguments)
    except HelpAsked:
        print(USAGE.replace("python -m distlab.launch", "distlab run"), end="")
        return 0
    except LaunchError as error:
        print(f"distlab run: {error}", file=sys.stderr)
        return BAD_USAGE
    attach(functools.partial(_judge, LaunchConfig(**_only(line.settings))))
    sys.argv[:] = [line.script, *line.arguments]
    if line.settings.get("run_as") == "module":
        runpy.run_module(line.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(line.script).resolve().parent)
        runpy.run_path(line.script, run_name="__main__")
    return 0


def _judge(config: LaunchConfig, store: Any, world_size: int) -> Callable[[], object]:
    from distlab.launch.hangs import watch_for
    from distlab.recorder.recorder import prefix

    return watch_for(config, store, prefix(), world_size).look


def _only(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The launcher that started this rank has the other settings."""
    return {name: settings[name] for name in _SETTINGS if name in settings}


if __name__ == "__main__":
    put_last()
    sys.exit(main(sys.argv[1:]))
