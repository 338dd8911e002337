"""Flags of `distlab sim` and `distlab scale`, which are implemented in `sim`."""

from __future__ import annotations

from typing import Annotated

import typer

from distlab.cli.options import Json

FOR_TASKS, FOR_SCRIPTS = "Options for a task", "Options for a script"
"""Panels of the help; `_require_fitting` refuses an option of the other one."""

Target = Annotated[
    str,
    typer.Argument(
        help="A task such as 1.4, unit:function, or FILE.py:FUNCTION. The default is "
        "the task that you checked last."
    ),
]
Net = Annotated[
    str,
    typer.Option(
        help="Network to simulate: a name such as ethernet-100g, nvlink or dgx-h100; "
        "alpha=10us,bw=100Gbit; nvlink:8,nic=400Gbit,oversub=4; or table:FILE."
    ),
]
Size = Annotated[
    str,
    typer.Option(
        help="Size of each rank's tensor, such as 64KiB, 1MiB or 4MB.",
        rich_help_panel=FOR_TASKS,
    ),
]
Whose = Annotated[
    str,
    typer.Option(
        help="Whose code to run: mine or reference. The default is your own code if "
        "you have written it.",
        rich_help_panel=FOR_TASKS,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed for the values that the ranks hold.")]


def sim(
    context: typer.Context,
    name: Target = "",
    world_size: Annotated[
        int, typer.Option("--world-size", "-n", help="Number of ranks, up to 4096.")
    ] = 64,
    net: Net = "ethernet-100g",
    fault: Annotated[
        str,
        typer.Option(
            help="Faults to inject, separated by commas: straggler=3:2.5, "
            "kill=5@0.2s, restart=0@0.2s-0.5s, freeze=1@0.2s-0.5s, late=7@1s, "
            "loss=1%, duplicate=1%, partition=0-3@0.1s-0.2s."
        ),
    ] = "",
    size: Size = "1MiB",
    code: Whose = "",
    seed: Seed = 0,
    html: Annotated[str, typer.Option(help="Write the timeline to this file.")] = "",
    perfetto: Annotated[
        str, typer.Option(help="Write a Chrome trace to this file.")
    ] = "",
    chakra: Annotated[
        str,
        typer.Option(
            help="Write Chakra traces, one per rank, to this folder.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = "",
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Show the reference's run below your own.",
            rich_help_panel=FOR_TASKS,
        ),
    ] = False,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the timeline in a browser.")
    ] = False,
    as_json: Json = False,
    nodes: Annotated[
        str,
        typer.Option(
            help="Node layout, where 32x8 means 32 nodes of 8 ranks.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = "",
    flops: Annotated[
        float,
        typer.Option(
            help="How many floating-point operations a rank does per second.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = 1e13,
    all_output: Annotated[
        bool,
        typer.Option(
            "--all-output",
            help="Print the output of all ranks.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="cuda, which gives each rank a pretend GPU, or cpu.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = "cuda",
    own: Annotated[
        list[str] | None,
        typer.Option(
            help="A package that each rank loads for itself. Can be repeated.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = None,
    fake: Annotated[
        bool,
        typer.Option(
            "--fake",
            help="Neither store nor compute tensor values.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = False,
    play: Annotated[
        str,
        typer.Option(
            help="With --fake: which ranks run the script, such as 0,1,255 or all.",
            rich_help_panel=FOR_SCRIPTS,
        ),
    ] = "",
) -> int:
    """Run your script or function on simulated ranks in virtual time.

    `distlab sim -n 256 script.py [ARGS]` and `-m module [ARGS]` run any script that
    torchrun can run. `distlab sim 1.4` runs a task and draws a timeline.
    """
    from distlab.cli.script_args import script_of

    script = script_of(context)
    if script is not None and name:
        raise ValueError(
            f"{name} and {script[0]} can't both be simulated; name a task or a script"
        )
    _require_fitting(context, script[0] if script else "")
    if script is not None:
        from distlab.cli.sim_script import sim_script
        from distlab.sim.torch.script import Script

        return sim_script(
            Script(*script),
            world_size=world_size,
            nodes=nodes,
            net=net,
            fault=fault,
            flops=flops,
            seed=seed,
            all_output=all_output,
            own=tuple(own or ()),
            device=device,
            fake=fake,
            play=play,
            html=html,
            perfetto=perfetto,
            chakra=chakra,
            open_it=open_it,
            as_json=as_json,
        )
    from distlab.cli.sim import sim

    return sim(
        name,
        world_size=world_size,
        net=net,
        fault=fault,
        size=size,
        code=code,
        seed=seed,
        html=html,
        perfetto=perfetto,
        beside=beside,
        open_it=open_it,
        as_json=as_json,
    )


def _require_fitting(context: typer.Context, script: str) -> None:
    """Refuse an option that would be ignored; without a script it's a task's run.

    Raises:
        ValueError: an option of the other panel was given.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        panel = getattr(option, "rich_help_panel", None)
        if script and panel == FOR_TASKS:
            raise ValueError(
                f"{option.opts[0]} is for a task, and {script} is a script: leave the "
                "option out"
            )
        if not script and panel == FOR_SCRIPTS:
            raise ValueError(
                f"{option.opts[0]} is for a script, as in distlab sim {option.opts[0]} "
                "… train.py: leave it out for a task"
            )


def scale(
    name: Target = "",
    worlds: Annotated[
        list[int] | None, typer.Option("-n", help="Number of ranks. Can be repeated.")
    ] = None,
    net: Net = "ethernet-100g",
    size: Size = "64KiB",
    code: Whose = "",
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Run your function on 2, 4, … 1,024 ranks and compare its times with formulas."""
    from distlab.cli.sim import scale

    return scale(
        name,
        worlds=tuple(worlds or ()),
        net=net,
        size=size,
        code=code,
        seed=seed,
        as_json=as_json,
    )
