"""`distlab`, and `python -m distlab`: the command line, and what Ctrl-C means to it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it at any moment, with one line and 130."""
    from distlab.search_order import put_last

    put_last()
    import signal

    try:
        if sys.argv[1:2] == ["setup"]:  # it needs nothing at all
            from distlab.set_up import set_up

            sys.exit(set_up(sys.argv[2:]))
        if sys.argv[1:2] == ["run"]:  # it needs nothing but torch
            from distlab.run.__main__ import main as run_script

            sys.exit(run_script(sys.argv[2:]))
        from distlab.cli.app import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"distlab: this command needs the package {error.name}: pip install "
            f"{error.name}. `python -m distlab run` works without it."
        )
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
        from distlab.cli.screen import stopped

        sys.exit(stopped())


if __name__ == "__main__":
    main()
