"""`distlab`, and `python -m distlab`: the command line, and what Ctrl-C means to it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it at any moment, with one line and 130."""
    from distlab.search_order import put_last

    put_last()
    import signal

    try:
        from distlab.cli.app import main as run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
        from distlab.cli.screen import stopped

        sys.exit(stopped())


if __name__ == "__main__":
    main()
