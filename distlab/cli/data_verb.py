"""Flags of `distlab data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data(
    action: Annotated[str, typer.Argument(help="make or check.")],
    folder: Annotated[Path, typer.Argument(help="The folder with the images.")],
    kind: Annotated[
        str, typer.Option("--from", help="make: digits, photos or fashion-mnist.")
    ] = "digits",
    images: Annotated[
        int, typer.Option(help="make: at most this many images; all by default.")
    ] = 0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="check: exit with code 1 if there is a problem."),
    ] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="check: name every file, not just ten of a kind."),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            "-j", "--workers", help="check: number of processes that decode images."
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> int:
    """Make an image folder in ImageNet's layout, or find the problems in one."""
    if action == "make":
        from distlab.cli.data import make

        return make(folder, kind, num_images=images, as_json=as_json)
    if action == "check":
        from distlab.cli.data import check

        return check(
            folder, strict=strict, every=every, num_workers=workers, as_json=as_json
        )
    raise ValueError(f"{action}: use distlab data make DIR or distlab data check DIR")
