"""Flags of `distlab plan`, which is implemented in `plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from distlab.cli.options import Json


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model, such as llama-70b, or a TOML file."
        ),
    ] = "",
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 8,
    cluster: Annotated[
        str,
        typer.Option("--on", help="A cluster, such as dgx-h100, or a TOML file."),
    ] = "dgx-h100",
    model_file: Annotated[
        str, typer.Option("--model", help="The model, if you prefer an option.")
    ] = "",
    sequence: Annotated[
        int | None,
        typer.Option(
            "--seq",
            help="Tokens in a sequence. The default is what the model was trained on.",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences in a step. The default makes about 4 million tokens."
        ),
    ] = None,
    max_memory: Annotated[
        str, typer.Option(help="Memory that a GPU may use, such as 70GB.")
    ] = "",
    layout: Annotated[
        str,
        typer.Option(
            help="Fix a part of the layout, such as tensor=8,zero=1. The names are "
            "data, tensor, pipeline, context, chunks, zero, microbatch, recompute and "
            "sequence."
        ),
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="Tokens to train on, such as 15T, for days and price.")
    ] = "",
    price: Annotated[
        float,
        typer.Option(
            help="Dollars per GPU and hour. The default is what the cluster says."
        ),
    ] = 0.0,
    rows: Annotated[int, typer.Option(help="Number of layouts to show.")] = 8,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="Show the formula and the lesson behind each number."
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option("--sim", help="Also run the fastest layout in the simulator."),
    ] = False,
    html: Annotated[
        str, typer.Option(help="With --sim: write the timeline to this file.")
    ] = "",
    open_it: Annotated[
        bool, typer.Option("--open", help="With --sim: open the timeline.")
    ] = False,
    demand: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            help='Exit with 1 unless this is true: "fits", or "mfu >= 0.4". Can be '
            "repeated.",
        ),
    ] = None,
    code: Annotated[
        str,
        typer.Option(
            help="Whose formulas to use: mine, reference, or a file of yours."
        ),
    ] = "reference",
    as_json: Json = False,
) -> int:
    """Find the fastest layout that fits, and derive its time, memory and MFU."""
    from distlab.cli.plan import plan

    return plan(
        model_file or model,
        num_gpus=gpus,
        cluster=cluster,
        sequence=sequence,
        global_batch=global_batch,
        max_memory=max_memory,
        layout=layout,
        tokens=tokens,
        price=price,
        rows=rows,
        why=why,
        claims=demand or [],
        simulate=simulate or open_it or bool(html),
        html=html,
        open_it=open_it,
        code=code,
        as_json=as_json,
    )
