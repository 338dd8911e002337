"""Where modules are looked for: what lies in the working folder comes last.

Python itself looks there first (`python -m`), so that a random.py or a torch.py of the
learner's would stand in for the library's, in distlab's own code too.
"""

import os
import sys


def put_last(*folders: str) -> None:
    """Look for modules in `folders` and in the working folder after everywhere else."""
    last = {os.path.realpath(folder) for folder in (*folders, os.curdir)}
    behind = [path for path in sys.path if os.path.realpath(path) in last]
    sys.path[:] = [path for path in sys.path if path not in behind]
    sys.path += dict.fromkeys(map(os.path.realpath, (*behind, *folders)))
