"""Run as a rank's first program: tie its life to the agent's, then become the script.

    python -I -S boot.py AGENT_PID COMMAND …

A killed agent can't end its ranks. So each rank asks the kernel (Linux) to do it,
and then replaces this program by the command. It is a program rather than code between
fork and exec because the agent has threads by then, and forked Python code could wait
for a lock that one of them held.

Limits: processes that a rank has started itself outlive a killed agent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(agent: int, command: list[str]) -> None:
    """Become `command` for as long as the process `agent` lives."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it has ended in the meantime
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} can't be run: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
