"""The flags of `distlab data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data(
    action: Annotated[str, typer.Argument(help="make, or check.")],
    folder: Annotated[Path, typer.Argument(help="The folder of the images.")],
    kind: Annotated[
        str, typer.Option("--from", help="make: digits, photos or fashion-mnist.")
    ] = "digits",
    images: Annotated[int, typer.Option(help="make: how many, at most; else all.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="check: exit with 1 if there is a problem.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="check: name each file, not ten of a kind.")
    ] = False,
    workers: Annotated[
        int, typer.Option("-j", "--workers", help="check: processes that decode.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, nothing else.")
    ] = False,
) -> int:
    """Make an image folder in ImageNet's layout, or find what is wrong with one."""
    if action == "make":
        from distlab.cli.data import make

        return make(folder, kind, num_images=images, as_json=as_json)
    if action == "check":
        from distlab.cli.data import check

        return check(
            folder, strict=strict, every=every, num_workers=workers, as_json=as_json
        )
    raise ValueError(f"distlab data make DIR, or distlab data check DIR; not {action}")
