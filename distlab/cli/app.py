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
from distlab.cli.data_verb import data
from distlab.cli.ddp_verb import ddp
from distlab.cli.maintainer_verbs import bench, mutants, templates
from distlab.cli.screen import stopped, warn
from distlab.cli.script_args import ScriptCommand
from distlab.cli.sim_verbs import scale, sim
from distlab.cli.top import top
from distlab.cli.train_verb import train
from distlab.grading.verdict import HARNESS, USAGE

P = ParamSpec("P")

MORE, MAINTAINERS = "More", "Maintainers"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Learn distributed training from scratch: build it, break it, watch it run.",
)

Code = Annotated[str, typer.Option(help="Run this code: mine, reference, or a file.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
Ranks = Annotated[
    list[int] | None, typer.Option("-n", help="Number of ranks; can be repeated.")
]
TaskName = Annotated[
    str, typer.Argument(help="Number, id or name; the current task by default.")
]


OVERVIEW = """\
Learn distributed training from scratch: build it, break it, watch it run.

  distlab start     take a 15-minute tour that ends at your first task
  distlab watch     check your code whenever you save
  distlab check     check a task (1.4), a phase, or the current task now
  distlab hint      get a question, then the principle, the steps, near-code
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
        f"this is a mistake in distlab, not in your code: {type(error).__name__}: "
        f"{error} (DISTLAB_TRACEBACK=1 shows where)"
    )


def _complain(sentence: str, code: int) -> int:
    warn(sentence)
    return code


@verb()
def start() -> int:
    """Take a 15-minute tour: five screens, two predictions, and your first task."""
    from distlab.cli.start import start

    return start()


@verb()
def watch(task: TaskName = "", n: Ranks = None, as_json: Json = False) -> int:
    """Check your code whenever you save it."""
    from distlab.cli.watch import watch

    return watch(task, worlds=n or [], as_json=as_json)


@verb()
def check(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(help="Tasks, such as 1.4, or a phase, such as 1."),
    ] = None,
    phase: Annotated[
        int | None, typer.Option(help="Check all tasks of a phase.")
    ] = None,
    code: Code = "mine",
    as_json: Json = False,
    n: Ranks = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeat a verdict that named this seed.")
    ] = None,
) -> int:
    """Check one task, several, a whole phase, or by default the current task."""
    from distlab.cli.check import check

    return check(
        tasks or [], phase=phase, code=code, as_json=as_json, worlds=n or [], seed=seed
    )


@verb()
def hint(
    task: TaskName = "",
    level: Annotated[
        int | None, typer.Option(help="1 to 4; one deeper than last time by default.")
    ] = None,
) -> int:
    """Get a hint: first a question, then the principle, the steps, and near-code."""
    from distlab.cli.hint import hint

    return hint(task, level=level)


@verb()
def trace() -> int:
    """Draw the last failing run: who sent what, and who is waiting for whom."""
    from distlab.cli.trace import trace

    return trace()


@verb()
def status(
    all_phases: Annotated[
        bool, typer.Option("--all", help="Show every phase, not only the current one.")
    ] = False,
    route: Annotated[
        str, typer.Option(help="Show one route only: ddp, llm or survive.")
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
            help="1; 2: 2 × 2 ranks; 3: your library; 4: a slow rank and a SIGKILL."
        ),
    ] = 1,
) -> int:
    """Train on digits with four processes, and get the same weights as with one."""
    from distlab.cli.demo import demo

    return demo(world_size=n, epochs=epochs, code=code, as_json=as_json, phase=phase)


verb(panel=MORE)(ddp)
verb(panel=MORE)(data)
verb(panel=MORE)(top)
verb(panel=MORE)(train)
verb(panel=MORE)(chaos)
verb(panel=MORE, cls=ScriptCommand)(sim)
verb(panel=MORE)(scale)
verb(panel=MORE, cls=ScriptCommand)(audit)


@verb(panel=MORE)
def explain(
    asked: Annotated[
        str, typer.Argument(help="A name, a question, or an error that you paste.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="List every name.")] = False,
) -> int:
    """Explain a concept, the last verdict or an error of torch; answer a question."""
    from distlab.cli.explain import explain, piped

    return explain(asked or piped(), every=every)


@app.command(
    "run",
    rich_help_panel=MORE,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def run_script(context: typer.Context) -> None:
    """Run any torch.distributed script as torchrun does, and explain a hang."""
    from distlab.run.__main__ import main

    raise typer.Exit(main(context.args))


@verb("explain-hang", panel=MORE)
def explain_hang(
    files: Annotated[
        list[Path], typer.Argument(help="One dump per rank, or their folder.")
    ],
    ranks: Annotated[
        int,
        typer.Option(help="How many ranks the job had, if the last one left no dump."),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Why a job hung, from the dumps of torch's flight recorder."""
    from distlab.cli.explain_hang import explain_hang

    return explain_hang(files, num_ranks=ranks, as_json_object=as_json)


@verb(panel=MORE)
def guide(
    name: Annotated[
        str,
        typer.Argument(
            help="A task, such as 1.4, or a unit; the current task by default."
        ),
    ] = "",
) -> int:
    """Open the page that explains a task."""
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
        int, typer.Argument(help="Number of a phase; the current one by default.")
    ] = 0,
    answers: Annotated[
        str | None, typer.Option(help="All answers at once, separated by semicolons.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Ask with the same numbers again.")
    ] = None,
) -> int:
    """Answer a phase's questions; your answers stay on this machine, ungraded."""
    from distlab.cli.quiz import quiz

    return quiz(phase, answers=answers, seed=seed)


@verb(panel=MORE)
def hunt(
    milestone: Annotated[str, typer.Argument(help="A milestone, such as 1.7.")] = "",
    line: Annotated[
        int | None, typer.Option(help="The line that you think is wrong.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Hunt before the milestone has passed.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Another one.")] = False,
) -> int:
    """Find the one wrong line in a finished solution."""
    from distlab.cli.hunt import hunt

    return hunt(milestone, line=line, anyway=anyway, new=new)


@verb(panel=MORE)
def drill(
    seed: Annotated[
        int | None, typer.Option(help="Inject the same fault again.")
    ] = None,
    code: Code = "mine",
    as_json: Json = False,
) -> int:
    """Break a real training run, and see whether your 4.12 can tell what went wrong."""
    from distlab.cli.drill import drill

    return drill(seed=seed, code=code, as_json=as_json)


@verb("score-test", panel=MORE)
def score_test(
    name: Annotated[str, typer.Argument(help="A unit or one of its tasks.")] = "",
    file: Annotated[
        str, typer.Option(help="Score the tests in this file instead.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Score your own tests by the wrong solutions that they catch."""
    from distlab.cli.score_test import score_test

    return score_test(name, file=file, as_json=as_json)


@verb(panel=MORE)
def use(
    side: Annotated[str, typer.Argument(help="mine, reference or auto.")] = "",
    names: Annotated[
        list[str] | None, typer.Argument(help="Units or tasks; all by default.")
    ] = None,
) -> int:
    """Choose whose code runs where several units work together."""
    from distlab.cli.use import use

    return use(side, names or [])


@verb(panel=MORE)
def diff(
    task: Annotated[
        str,
        typer.Argument(
            help="A task's number, id or name. By default the last checked."
        ),
    ] = "",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Show it even before the task has passed.")
    ] = False,
) -> int:
    """Compare your function with the reference's once it has passed."""
    from distlab.cli.diff import diff

    return diff(task, anyway=anyway)


@verb(panel=MORE)
def update(
    unit: Annotated[str, typer.Argument(help="The unit. All by default.")] = "",
) -> int:
    """Move your code into newer templates, and keep the old files beside them."""
    from distlab.cli.update import update

    return update(unit)


@verb(panel=MORE)
def calibrate(
    out: Annotated[str, typer.Option(help="Where to write the table.")] = "",
    seconds: Annotated[float, typer.Option(help="How many seconds to measure.")] = 20.0,
    as_json: Json = False,
) -> int:
    """Measure this machine's link for the simulator, then test its predictions."""
    from distlab.cli.calibrate import calibrate

    return calibrate(out=out, seconds=seconds, as_json=as_json)


@verb(panel=MORE)
def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(help="Only test whether N ranks can talk to each other."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Find out whether this machine can run the course and, if it can't, why."""
    if ranks is not None:
        from distlab.cli.doctor_ranks import doctor_of_ranks

        return doctor_of_ranks(ranks, as_json=as_json)
    from distlab.cli.doctor import doctor

    return doctor(as_json=as_json)


@verb(panel=MORE)
def reset(
    unit: Annotated[str, typer.Argument(help="A unit, such as collectives.")] = "",
) -> int:
    """Start a unit's file over, and keep the old file beside it."""
    from distlab.cli.reset import reset

    return reset(unit)


for maintainers in (templates, mutants, bench):
    verb(panel=MAINTAINERS)(maintainers)
