"""`python -m distlab.launch`."""

from __future__ import annotations

import os
import sys

from distlab.search_order import put_last

BAD_USAGE = 2
NAME = "distlab.launch"


def main(arguments: list[str], name: str = f"python -m {NAME}") -> int:
    """Launch as the command line says; return the exit code, 2 if we can't start.

    `name` is what users have typed.
    """
    try:
        return _launch(arguments, name)
    except KeyboardInterrupt:  # before there was anything to stop
        from distlab.launch.interrupts import stopped

        return stopped()
    finally:
        from distlab.processes.tree import end_descendants

        end_descendants()


def _launch(arguments: list[str], name: str) -> int:
    from distlab.launch.arguments import USAGE, HelpAsked, parse
    from distlab.launch.config import config_from
    from distlab.launch.interrupts import ending_at_once
    from distlab.launch.report import misplaced
    from distlab.launch.slurm import agent_settings
    from distlab.launch.streams import tell

    with ending_at_once():  # they import torch
        from distlab.launch.decisions import DecisionError
        from distlab.launch.launcher import DistributedLauncher
    try:
        line = parse(arguments, os.environ, agent_settings(os.environ))
        config = config_from(line.settings)
        if line.misplaced:
            tell(sys.stderr, misplaced(line.misplaced, line.script))
        return DistributedLauncher(config).launch(line.script, *line.arguments)
    except HelpAsked:
        tell(sys.stdout, USAGE.replace(f"python -m {NAME}", name))
        return 0
    except (ValueError, DecisionError) as error:
        said = str(error).replace(f"python -m {NAME}", name)
        tell(sys.stderr, f"{name.removeprefix('python -m ')}: {said}\n")
        return 1 if isinstance(error, DecisionError) else BAD_USAGE


if __name__ == "__main__":
    put_last()
    code = main(sys.argv[1:])
    from distlab.launch.streams import is_stuck, let_go

    if is_stuck():
        os._exit(code)
    let_go(sys.stdout)
    let_go(sys.stderr)
    sys.exit(code)
