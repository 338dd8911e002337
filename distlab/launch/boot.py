"""Run as a rank's first program: tie its life to the agent's, then become the script.

    python -I -S boot.py AGENT_PID COMMAND …

An agent that is killed can't end its ranks. So each rank asks the kernel (Linux) to do
that, and then replaces this program by the command. It has to be a program, and not
code between fork and exec, because the agent has threads by then. If we ran Python code
after the fork, it could wait for a lock that one of these threads held.

Limits: if a rank has started processes itself, these outlive a killed agent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(agent: int, command: list[str]) -> None:
    """Become `command`, and end when the process `agent` ends."""
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
