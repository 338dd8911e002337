"""Flags of `distlab data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distlab.cli.options import Json


def data(
    action: Annotated[
        str, typer.Argument(help="What to do with the folder: make or check.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder with the images.")],
    kind: Annotated[
        str,
        typer.Option(
            "--from",
            help="For make: which images to use, digits, photos or fashion-mnist.",
        ),
    ] = "digits",
    images: Annotated[
        int,
        typer.Option(
            help="For make: use at most this many images. The default is all of them."
        ),
    ] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="For check: exit with code 1 if there is any problem."
        ),
    ] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="For check: list all files with a problem, not just ten of each kind.",
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            "-j",
            "--workers",
            help="For check: number of processes that decode images.",
        ),
    ] = 1,
    as_json: Json = False,
) -> int:
    """Create an image folder in ImageNet's layout, or check one for problems."""
    if action == "make":
        from distlab.cli.data import make

        return make(folder, kind, num_images=images, as_json=as_json)
    if action == "check":
        from distlab.cli.data import check

        return check(
            folder, strict=strict, every=every, num_workers=workers, as_json=as_json
        )
    raise ValueError(f"{action}: use distlab data make DIR or distlab data check DIR")
