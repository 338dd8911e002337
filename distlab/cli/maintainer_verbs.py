"""The verbs of those who maintain the course, with their flags."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from distlab.cli.bench import names as benchmarks

Json = Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")]


def templates(
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether they are up to date.")
    ] = False,
) -> int:
    """Write the templates from the solutions; never over a learner's edits."""
    from distlab.cli.templates import templates

    return templates(check_only=check)


def mutants(
    phase: Annotated[int | None, typer.Option(help="One phase only.")] = None,
    only: Annotated[
        str, typer.Option("--only", "--task", help="Ids or tasks that contain this.")
    ] = "",
    generated: Annotated[
        bool,
        typer.Option(
            "--generated", help="Also generated mutants: one small change each."
        ),
    ] = False,
    touched: Annotated[
        bool,
        typer.Option(
            "--touched",
            help="The units that changed, and one entry of each other unit.",
        ),
    ] = False,
    stamp: Annotated[
        bool, typer.Option("--stamp", help="Note the units that are right throughout.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="After so many none of the catalogue begins.")
    ] = math.inf,
    readme: Annotated[
        bool, typer.Option("--readme", help="Only write the table of counts.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Grade wrong solutions that must be rejected and right ones that must pass."""
    from distlab.cli.mutants import mutants, write_readme

    if readme:
        return write_readme()
    return mutants(
        phase=phase,
        only=only,
        as_json=as_json,
        generated=generated,
        touched=touched,
        stamp=stamp,
        minutes=minutes,
    )


def bench(
    name: Annotated[
        str,
        typer.Argument(help=f"Which: {', '.join(benchmarks())}."),
    ],
    as_json: Json = False,
    corpus: Annotated[
        bool, typer.Option("--corpus", help="Of sim: also list all its programs.")
    ] = False,
    min_efficiency: Annotated[
        float | None,
        typer.Option(help="Of scaling: fail where ranks with a core each have less."),
    ] = None,
) -> int:
    """Measure a figure that the README quotes."""
    from distlab.cli.bench import bench

    return bench(name, as_json=as_json, corpus=corpus, min_efficiency=min_efficiency)
