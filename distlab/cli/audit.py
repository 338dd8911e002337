"""`distlab audit`: run a script on simulated ranks, and say what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distlab.cli.options import Json
from distlab.cli.screen import show, show_json, waiting
from distlab.grading.verdict import FAILED, PASS


def audit(
    context: typer.Context,
    n: Annotated[int, typer.Option("-n", help="Number of ranks.")] = 4,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Ignore findings with this name. Can be repeated."),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run the ranks as processes, with gloo.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Find mistakes in a torch.distributed script by running it on simulated ranks.

    `distlab audit -n 4 script.py [ARGS]` and `-m module [ARGS]` run any script that
    torchrun can run. The exit code is 0 if we find nothing, else 1.
    """
    from distlab.audit import audit
    from distlab.audit.report import page
    from distlab.cli.script_args import script_of

    script = script_of(context)
    if script is None:
        raise ValueError("name a script to audit, as in distlab audit -n 4 train.py")
    target, arguments, is_module = script
    with waiting(f"auditing on {n} ranks", quiet=as_json):
        report = audit(
            target,
            arguments,
            num_ranks=n,
            is_module=is_module,
            real=real,
            ignore=frozenset(ignore or ()),
        )
    if as_json:
        show_json(report.as_json())
    else:
        show(page(report, Path.cwd()))
    return PASS if report.is_right else FAILED
