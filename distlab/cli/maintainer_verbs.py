"""Flags of the verbs that only maintainers of the course need."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from distlab.cli.bench import names as benchmarks

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]


def templates(
    check: Annotated[
        bool, typer.Option("--check", help="Only report whether they are up to date.")
    ] = False,
) -> int:
    """Generate the templates from the solutions without overwriting anyone's edits."""
    from distlab.cli.templates import templates

    return templates(check_only=check)


def mutants(
    phase: Annotated[int | None, typer.Option(help="Grade one phase only.")] = None,
    only: Annotated[
        str,
        typer.Option(
            "--only", "--task", help="Grade entries whose id or task contains this."
        ),
    ] = "",
    generated: Annotated[
        bool,
        typer.Option(
            "--generated",
            help="Also grade generated mutants, which differ by one small change each.",
        ),
    ] = False,
    touched: Annotated[
        bool,
        typer.Option(
            "--touched",
            help="Grade the units that changed, and one entry of each other unit.",
        ),
    ] = False,
    stamp: Annotated[
        bool,
        typer.Option(
            "--stamp", help="Record the units whose entries were all judged right."
        ),
    ] = False,
    minutes: Annotated[
        float,
        typer.Option(min=0.1, help="Start no more entries after this many minutes."),
    ] = math.inf,
    readme: Annotated[
        bool,
        typer.Option(
            "--readme", help="Only write the table of counts into the readme."
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Grade wrong solutions, which must fail, and right ones, which must pass."""
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
        typer.Argument(help=f"Which benchmark: {', '.join(benchmarks())}."),
    ],
    as_json: Json = False,
    corpus: Annotated[
        bool, typer.Option("--corpus", help="For sim: also list all its programs.")
    ] = False,
    min_efficiency: Annotated[
        float | None,
        typer.Option(help="For scaling: fail if ranks with a core each reach less."),
    ] = None,
) -> int:
    """Measure one of the figures that the README quotes."""
    from distlab.cli.bench import bench

    return bench(name, as_json=as_json, corpus=corpus, min_efficiency=min_efficiency)
