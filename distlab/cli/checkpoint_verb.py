"""Flags of `distlab checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distlab.cli.options import Json


def checkpoint(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder with checkpoints.")
    ],
    target: Annotated[
        Path | None,
        typer.Argument(
            help="Write it to this new folder in the other format. Without it, only "
            "show what the checkpoint contains."
        ),
    ] = None,
    program: Annotated[
        str,
        typer.Option(
            "--for",
            help="What is to load the result, if another program saved the DCP "
            "folder: train, ddp or library.",
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Convert a checkpoint to torch's format, which FSDP2 scripts load, or back."""
    from distlab.cli.checkpoint import checkpoint

    return checkpoint(source, target, program=program, as_json=as_json)
