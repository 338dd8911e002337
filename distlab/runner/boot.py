"""The first lines of a process that plays ranks: python -P boot.py MAIN ARGUMENTS.

MAIN is the module whose `main` we call with the arguments.

It is run as a script, and finds distlab beside itself, because the folder that distlab
lies in is often the learner's own: that folder is put behind all others, and no file in
it can stand in for a library that ranks need.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main() -> None:
    """Find distlab, then let it go on."""
    from importlib import import_module

    # Next to an installed wheel are all the other libraries, and no learner's files.
    installed = os.path.isdir(os.path.join(ROOT, "distlab", "course"))
    if not (installed and ROOT in sys.path):
        sys.path.insert(0, ROOT)
    from distlab.search_order import put_last

    put_last(*([] if installed else [ROOT]))
    import_module(sys.argv[1]).main(sys.argv[2:])


if __name__ == "__main__":
    main()
