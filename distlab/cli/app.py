"""Names, flags and help of every verb; the modules beside this file do the work.

Each verb imports its own module when it is called, so that `distlab status` does not
wait for torch.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from typer.core import TyperCommand

from distlab.cli.audit import audit
from distlab.cli.chaos import chaos
from distlab.cli.checkpoint_verb import checkpoint
from distlab.cli.data_verb import data
from distlab.cli.ddp_verb import ddp
from distlab.cli.maintainer_verbs import bench, blind, mutants, new_task, templates
from distlab.cli.options import Json
from distlab.cli.plan_verb import plan
from distlab.cli.screen import stopped, warn
from distlab.cli.script_args import ScriptCommand
from distlab.cli.sim_verbs import scale, sim
from distlab.cli.top import top
from distlab.cli.train_verb import TrainCommand, train
from distlab.grading.verdict import HARNESS, USAGE

P = ParamSpec("P")

MORE, MAINTAINERS = "More", "Maintainers"
SCRIPTS = "Your own script"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Learn distributed training from scratch: build it, break it, watch it run.",
)

Code = Annotated[
    str, typer.Option(help="Whose code to run: mine, reference, or a file of yours.")
]
Ranks = Annotated[
    list[int] | None, typer.Option("-n", help="Number of ranks. Can be repeated.")
]
TaskName = Annotated[
    str,
    typer.Argument(
        help="A task's number, id or name. The default is the current task."
    ),
]


OVERVIEW = """\
Learn distributed training from scratch: build it, break it, watch it run.

  distlab start     take a 15-minute tour that ends at your first task
  distlab watch     check your code every time you save it
  distlab check     check the current task, or a task such as 1.4, or a phase
  distlab hint      get hints: a question, the principle, the steps, near-code
  distlab trace     draw the last failing run
  distlab status    show how far you've come

  distlab --help    list all commands: demo, ddp, explain, quiz, hunt, diff …\
"""


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Learn distributed training from scratch: build it, break it, watch it run."""
    if context.invoked_subcommand is None:
        print(OVERVIEW)
        raise typer.Exit(USAGE)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" where the terminal has no "✓"
    app(prog_name="distlab")


def verb(
    *names: str, panel: str | None = None, cls: type[TyperCommand] | None = None
) -> Callable[[Callable[P, int]], Callable[P, None]]:
    """Turn a function that returns an exit code into a verb that reports errors."""

    def register(function: Callable[P, int]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                code = function(*args, **kwargs)
                if sys.stdout:
                    sys.stdout.flush()
            except KeyboardInterrupt:
                code = stopped()
            except BrokenPipeError:
                code = _unread()
            except (ValueError, ModuleNotFoundError) as error:
                code = _complain(str(error), USAGE)
            except OSError as error:
                code = _complain(_reason(error), HARNESS)
            except Exception as error:
                if os.environ.get("DISTLAB_TRACEBACK"):
                    raise
                code = _complain(_our_fault(error), HARNESS)
            raise typer.Exit(code)

        return app.command(*names, rich_help_panel=panel, cls=cls)(run)

    return register


def _unread() -> int:
    """Exit as the shell expects when the reader of our output, such as `head`, left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # or Python complains when it ends
    return 128 + signal.SIGPIPE


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _our_fault(error: Exception) -> str:
    return (
        f"this is a bug in distlab, not in your code: {type(error).__name__}: "
        f"{error} (to see the traceback, set DISTLAB_TRACEBACK=1)"
    )


def _complain(sentence: str, code: int) -> int:
    warn(sentence)
    return code


@verb()
def start(
    only_fetch: Annotated[
        bool,
        typer.Option(
            "--only-fetch",
            help="Don't take the tour. Only copy the course into this folder, if it is "
            "empty.",
        ),
    ] = False,
) -> int:
    """Take a 15-minute tour: five screens, two predictions, and your first task."""
    from distlab.cli.start import start

    return start(only_fetch=only_fetch)


@verb()
def watch(task: TaskName = "", n: Ranks = None, as_json: Json = False) -> int:
    """Check your code every time you save it."""
    from distlab.cli.watch import watch

    return watch(task, worlds=n or [], as_json=as_json)


@verb()
def check(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(help="One or more tasks, such as 1.4, or a phase, such as 1."),
    ] = None,
    phase: Annotated[
        int | None, typer.Option(help="Check all tasks of this phase.")
    ] = None,
    code: Code = "mine",
    as_json: Json = False,
    n: Ranks = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Reproduce a verdict by passing the seed that it shows."),
    ] = None,
) -> int:
    """Check the current task, or any tasks or phase that you name."""
    from distlab.cli.check import check

    return check(
        tasks or [], phase=phase, code=code, as_json=as_json, worlds=n or [], seed=seed
    )


@verb()
def hint(
    task: TaskName = "",
    level: Annotated[
        int | None,
        typer.Option(
            help="How much the hint gives away, from 1 to 4. The default is one level "
            "deeper than last time."
        ),
    ] = None,
) -> int:
    """Get a hint that goes deeper each time, from a question to almost the code."""
    from distlab.cli.hint import hint

    return hint(task, level=level)


@verb()
def trace() -> int:
    """Draw the last failing run to show who sent what and who was waiting for whom."""
    from distlab.cli.trace import trace

    return trace()


@verb()
def status(
    all_phases: Annotated[
        bool, typer.Option("--all", help="Show every phase, not just the current one.")
    ] = False,
    route: Annotated[
        str, typer.Option(help="Show only this route: ddp, llm or survive.")
    ] = "",
) -> int:
    """Show how far you've come and which task is next."""
    from distlab.cli.status import status

    return status(all_phases=all_phases, route=route)


@verb(panel=MORE)
def demo(
    n: Annotated[int, typer.Option("-n", help="Number of ranks.")] = 4,
    epochs: Annotated[
        int | None, typer.Option(help="Number of passes over the data.")
    ] = None,
    code: Code = "reference",
    as_json: Json = False,
    phase: Annotated[
        int,
        typer.Option(
            help="Which phase's demo to run: 1 trains one model on four processes, 2 "
            "trains on 2 × 2 ranks, 3 uses your library, and 4 has a slow rank and a "
            "SIGKILL."
        ),
    ] = 1,
) -> int:
    """Train on digits with four processes and get the same weights as with one."""
    from distlab.cli.demo import demo

    return demo(world_size=n, epochs=epochs, code=code, as_json=as_json, phase=phase)


verb(panel=MORE)(ddp)
verb(panel=MORE)(data)
verb(panel=MORE)(top)
verb(panel=SCRIPTS, cls=TrainCommand)(train)
verb(panel=MORE)(checkpoint)
verb(panel=MORE)(chaos)
verb(panel=SCRIPTS, cls=ScriptCommand)(sim)
verb(panel=MORE)(scale)
verb(panel=MORE)(plan)
verb(panel=SCRIPTS, cls=ScriptCommand)(audit)


@verb(panel=MORE)
def explain(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            help="A name, a question in your own words, or an error message."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every name that has an explanation.")
    ] = False,
) -> int:
    """Explain a concept, the last verdict or a torch error, or answer a question."""
    from distlab.cli.explain import explain, piped

    return explain(" ".join(asked or ()) or piped(), every=every)


@app.command(
    "run",
    rich_help_panel=SCRIPTS,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def run_script(context: typer.Context) -> None:
    """Run any torch.distributed script as torchrun does, and explain a hang."""
    from distlab.run.__main__ import main

    raise typer.Exit(main(context.args))


@verb("explain-hang", panel=SCRIPTS)
def explain_hang(
    files: Annotated[
        list[Path],
        typer.Argument(help="One dump per rank, or the folder that contains them."),
    ],
    ranks: Annotated[
        int,
        typer.Option(
            help="Total number of ranks. You only need this if the last rank left no "
            "dump."
        ),
    ] = 0,
    as_json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Also draw the calls as a timeline, on a page of this name."),
    ] = None,
) -> int:
    """Find out why a job hung, from the dumps of torch's flight recorder."""
    from distlab.cli.explain_hang import explain_hang

    return explain_hang(files, num_ranks=ranks, as_json_object=as_json, html=html)


@verb(panel=MORE)
def guide(
    name: Annotated[
        str,
        typer.Argument(
            help="A task, such as 1.4, or a unit. The default is the current task."
        ),
    ] = "",
) -> int:
    """Open the guide page that explains a task."""
    from distlab.cli.guide import guide

    return guide(name)


@verb(panel=MORE)
def mcp() -> int:
    """Serve the tutor to an AI assistant (MCP over standard input and output)."""
    from distlab.cli.mcp import mcp

    return mcp()


@verb(panel=MORE)
def quiz(
    phase: Annotated[
        int,
        typer.Argument(help="The phase to ask about. The default is the current one."),
    ] = 0,
    sheet: Annotated[
        bool,
        typer.Option(
            "--sheet",
            help="Ask for five formulas instead: bytes, seconds and memory in terms of "
            "n, B and other symbols.",
        ),
    ] = False,
    answers: Annotated[
        str | None,
        typer.Option(help="Give all your answers at once, separated by semicolons."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Get the same numbers in the questions again, by passing the seed "
            "that the quiz printed."
        ),
    ] = None,
) -> int:
    """Answer questions about a phase. They aren't graded and stay on this machine."""
    from distlab.cli.quiz import quiz

    return quiz(phase, sheet=sheet, answers=answers, seed=seed)


@verb(panel=MORE)
def hunt(
    milestone: Annotated[
        str, typer.Argument(help="The milestone task to hunt at, such as 1.7.")
    ] = "",
    line: Annotated[
        int | None, typer.Option(help="Number of the line that you think is wrong.")
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Start the hunt even before you pass the milestone."
        ),
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new hunt with another mistake.")
    ] = False,
) -> int:
    """Find the only wrong line in a finished solution."""
    from distlab.cli.hunt import hunt

    return hunt(milestone, line=line, anyway=anyway, new=new)


@verb(panel=MORE)
def drill(
    seed: Annotated[
        int | None,
        typer.Option(
            help="Inject the same fault again, by passing the seed that the drill "
            "printed."
        ),
    ] = None,
    code: Code = "mine",
    as_json: Json = False,
) -> int:
    """Break a real training run and see if your task 4.12 can tell what went wrong."""
    from distlab.cli.drill import drill

    return drill(seed=seed, code=code, as_json=as_json)


@verb("score-test", panel=MORE)
def score_test(
    name: Annotated[
        str,
        typer.Argument(help="The unit that your tests are for, or one of its tasks."),
    ] = "",
    file: Annotated[
        str,
        typer.Option(help="Score the tests in this file instead of the unit's file."),
    ] = "",
    as_json: Json = False,
) -> int:
    """Score your own tests by how many wrong solutions they catch."""
    from distlab.cli.score_test import score_test

    return score_test(name, file=file, as_json=as_json)


@verb(panel=MORE)
def use(
    side: Annotated[
        str, typer.Argument(help="Whose code to run: mine, reference or auto.")
    ] = "",
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="The units or tasks that this applies to. The default is all of them."
        ),
    ] = None,
) -> int:
    """Choose whose code runs when several units work together."""
    from distlab.cli.use import use

    return use(side, names or [])


@verb(panel=MORE)
def diff(
    task: Annotated[
        str,
        typer.Argument(
            help="A task's number, id or name. The default is the task that you "
            "checked last."
        ),
    ] = "",
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Show the comparison even before you pass the task."
        ),
    ] = False,
) -> int:
    """Compare your function with the reference solution once it has passed."""
    from distlab.cli.diff import diff

    return diff(task, anyway=anyway)


@verb(panel=MORE)
def update(
    unit: Annotated[
        str, typer.Argument(help="The unit to update. The default is all of them.")
    ] = "",
) -> int:
    """Move your code into newer templates, and keep your old files as backups."""
    from distlab.cli.update import update

    return update(unit)


@verb(panel=MORE)
def calibrate(
    out: Annotated[
        str, typer.Option(help="Write the table of measurements to this file.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="How long to measure, in seconds.")
    ] = 20.0,
    as_json: Json = False,
) -> int:
    """Measure this machine's link, then test the simulator's predictions with it."""
    from distlab.cli.calibrate import calibrate

    return calibrate(out=out, seconds=seconds, as_json=as_json)


@verb(panel=MORE)
def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(help="Only test if this many ranks can talk to each other."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check if this machine can run the course, and say what to fix if it can't."""
    if ranks is not None:
        from distlab.cli.doctor_ranks import doctor_of_ranks

        return doctor_of_ranks(ranks, as_json=as_json)
    from distlab.cli.doctor import doctor

    return doctor(as_json=as_json)


@verb(panel=MORE)
def setup(
    torch: Annotated[
        str, typer.Option(help="Which build of torch: auto, cpu, or pip's default.")
    ] = "auto",
    extras: Annotated[
        str, typer.Option(help="Extras of pyproject.toml, separated by commas.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the commands of pip.")
    ] = False,
) -> int:
    """Set up a clone's .venv, as make does, or install what an installed one lacks."""
    # `python -m distlab setup` comes here only from Python: see __main__.py.
    from distlab.set_up import set_up

    return set_up(["--torch", torch, "--extras", extras] + ["--dry-run"] * dry_run)


@verb(panel=MORE)
def reset(
    unit: Annotated[
        str, typer.Argument(help="The unit to reset, such as collectives.")
    ] = "",
) -> int:
    """Replace your file for a unit with a fresh template, and keep a backup."""
    from distlab.cli.reset import reset

    return reset(unit)


for maintainers in (templates, new_task, mutants, blind, bench):
    verb(panel=MAINTAINERS)(maintainers)
