"""`python -m distlab.launch`."""

from __future__ import annotations

import os
import sys

from distlab.search_order import put_last

BAD_USAGE = 2


def main(arguments: list[str]) -> int:
    """Launch what the command line says; the exit code, 2 for what cannot begin."""
    from distlab.launch.arguments import USAGE, HelpAsked, parse
    from distlab.launch.config import config_from
    from distlab.launch.decisions import DecisionError
    from distlab.launch.launcher import DistributedLauncher
    from distlab.launch.slurm import agent_settings
    from distlab.launch.streams import tell
    from distlab.runner.processes import end_descendants

    try:
        line = parse(arguments)
        config = config_from({**agent_settings(os.environ), **line.settings})
        return DistributedLauncher(config).launch(line.script, *line.arguments)
    except HelpAsked:
        tell(sys.stdout, USAGE)
        return 0
    except (ValueError, DecisionError) as error:
        tell(sys.stderr, f"distlab.launch: {error}\n")
        return 1 if isinstance(error, DecisionError) else BAD_USAGE
    except KeyboardInterrupt:  # before there was anything to stop
        return 130
    finally:
        end_descendants()


if __name__ == "__main__":
    put_last()
    code = main(sys.argv[1:])
    from distlab.launch.streams import let_go

    let_go(sys.stdout)
    let_go(sys.stderr)
    sys.exit(code)
