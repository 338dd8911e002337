"""Flags of the verbs that only maintainers of the course need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from distlab.cli.bench import names as benchmarks
from distlab.cli.options import Json


def templates(
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only report whether the templates are up to date.",
        ),
    ] = False,
) -> int:
    """Generate the templates from the solutions without overwriting anyone's edits."""
    from distlab.cli.own_course import need_a_clone
    from distlab.cli.templates import templates

    need_a_clone("templates")
    return templates(check_only=check)


def new_task(
    number: Annotated[
        str, typer.Argument(help="The task's number, such as 3.34.", metavar="NUMBER")
    ],
    task: Annotated[
        str, typer.Argument(help="Its id: an existing unit and a new name.")
    ],
) -> int:
    """Write the stubs of a new task, or list what is left to do for it."""
    from distlab.cli.new_task import new_task
    from distlab.cli.own_course import need_a_clone

    need_a_clone("new-task")
    return new_task(number, task)


def mutants(
    phase: Annotated[int | None, typer.Option(help="Grade one phase only.")] = None,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            "--task",
            help="Grade only entries whose id or task contains this text.",
        ),
    ] = "",
    generated: Annotated[
        bool,
        typer.Option(
            "--generated",
            help="Also grade generated mutants, each of which makes one small "
            "change to a solution.",
        ),
    ] = False,
    touched: Annotated[
        bool,
        typer.Option(
            "--touched",
            help="Grade all entries of units that have changed, and one entry from "
            "every other unit.",
        ),
    ] = False,
    stamp: Annotated[
        bool,
        typer.Option(
            "--stamp",
            help="Record which units had all of their entries judged correctly.",
        ),
    ] = False,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1, help="Stop starting new entries after this many minutes."
        ),
    ] = math.inf,
    second_try: Annotated[
        bool,
        typer.Option(
            "--second-try",
            help="Grade an entry once more if it wasn't judged as expected, and "
            "list it.",
        ),
    ] = False,
    sample: Annotated[
        int,
        typer.Option(
            min=0,
            help="Grade only this many entries for each clause, and as many right "
            "solutions for each task; 0 grades all.",
        ),
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Draw the checks' numbers from this seed, on which no verdict may "
            "depend.",
        ),
    ] = None,
    readme: Annotated[
        bool,
        typer.Option("--readme", help="Only update the table of counts in the README."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Check that wrong solutions are rejected and right ones are accepted."""
    from distlab.cli.mutants import mutants, write_readme
    from distlab.cli.own_course import need_a_clone
    from distlab.processes.tree import leaving_none

    need_a_clone("mutants")
    if readme:
        return write_readme()
    with leaving_none():
        return mutants(
            phase=phase,
            only=only,
            as_json=as_json,
            generated=generated,
            touched=touched,
            stamp=stamp,
            minutes=minutes,
            second_try=second_try,
            sample=sample,
            seed=seed,
        )


def blind(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the set.")],
    seeds: Annotated[
        int, typer.Option(min=1, help="Grade each solution with this many seeds.")
    ] = 1,
    only: Annotated[
        str, typer.Option(help="Grade only solutions whose id contains this text.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Grade solutions by people who haven't seen the checks."""
    from distlab.cli.blind import blind
    from distlab.cli.own_course import need_a_clone
    from distlab.processes.tree import leaving_none

    need_a_clone("blind")
    with leaving_none():
        return blind(folder, seeds=seeds, only=only, as_json=as_json)


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help=f"Which benchmark to run. Choose one of: {', '.join(benchmarks())}."
        ),
    ],
    as_json: Json = False,
    corpus: Annotated[
        bool,
        typer.Option(
            "--corpus",
            help="For sim: also list all the programs that the benchmark runs.",
        ),
    ] = False,
    min_efficiency: Annotated[
        float | None,
        typer.Option(
            help="For scaling: fail if the efficiency is lower than this in a run "
            "where every rank has its own core."
        ),
    ] = None,
) -> int:
    """Run the benchmark behind one of the figures that the README quotes."""
    from distlab.cli.bench import bench
    from distlab.cli.own_course import need_a_clone

    need_a_clone("bench")
    return bench(name, as_json=as_json, corpus=corpus, min_efficiency=min_efficiency)
