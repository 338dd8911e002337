"""The verbs of `distlab`: names, flags and help. What they do lives beside this file.

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
from typing import Annotated, ParamSpec

import typer

from distlab.cli.chaos import chaos
from distlab.cli.data_verb import data
from distlab.cli.ddp_verb import ddp
from distlab.cli.maintainer_verbs import bench, mutants, templates
from distlab.cli.screen import stopped, warn
from distlab.cli.sim_verbs import scale, sim
from distlab.cli.top import top
from distlab.cli.train_verb import train
from distlab.grading.verdict import HARNESS, USAGE

P = ParamSpec("P")

MORE, MAINTAINERS = "More", "Maintainers"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed training from scratch: build it, break it and see it.",
)

Code = Annotated[str, typer.Option(help="Whose code: mine, reference, or a file.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")]
Ranks = Annotated[
    list[int] | None, typer.Option("-n", help="Number of ranks; may be repeated.")
]
TaskName = Annotated[
    str, typer.Argument(help="Number, id or name; else the current one.")
]


OVERVIEW = """\
Distributed training from scratch: build it, break it and see it.

  distlab start     the first quarter of an hour: five screens, your first task
  distlab watch     a verdict at every save
  distlab check     a verdict now: on a task (1.4), a phase, the current one
  distlab hint      a question, then the principle, the steps, nearly the code
  distlab trace     the last failing run as a picture
  distlab status    where you are on the path

  distlab --help    these and the rest: demo, ddp, explain, quiz, hunt, diff …\
"""


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Distributed training from scratch: build it, break it and see it."""
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
    *names: str, panel: str | None = None
) -> Callable[[Callable[P, int]], Callable[P, None]]:
    """Make a function that returns an exit code a verb, with one sentence per error."""

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

        return app.command(*names, rich_help_panel=panel)(run)

    return register


def _unread() -> int:
    """Who reads our output has gone, as `head` does: the shell's code for that."""
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
    """The first quarter of an hour: five screens, two predictions, your first task."""
    from distlab.cli.start import start

    return start()


@verb()
def watch(task: TaskName = "", n: Ranks = None, as_json: Json = False) -> int:
    """A verdict at every save."""
    from distlab.cli.watch import watch

    return watch(task, worlds=n or [], as_json=as_json)


@verb()
def check(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Tasks, as 1.4, or a phase, as 1.")
    ] = None,
    phase: Annotated[int | None, typer.Option(help="All tasks of a phase.")] = None,
    code: Code = "mine",
    as_json: Json = False,
    n: Ranks = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeat a verdict with its numbers.")
    ] = None,
) -> int:
    """A verdict now: on one task, several, a phase, or the current one."""
    from distlab.cli.check import check

    return check(
        tasks or [], phase=phase, code=code, as_json=as_json, worlds=n or [], seed=seed
    )


@verb()
def hint(
    task: TaskName = "",
    level: Annotated[int | None, typer.Option(help="1 to 4; else one deeper.")] = None,
) -> int:
    """A question; then the principle; then the steps; then near-code."""
    from distlab.cli.hint import hint

    return hint(task, level=level)


@verb()
def trace() -> int:
    """The last failing run as a picture: who sent what, who waits for whom."""
    from distlab.cli.trace import trace

    return trace()


@verb()
def status(
    all_phases: Annotated[
        bool, typer.Option("--all", help="Every phase, not only the current one.")
    ] = False,
    route: Annotated[str, typer.Option(help="ddp, llm or survive: one aim.")] = "",
) -> int:
    """Where you are on the path."""
    from distlab.cli.status import status

    return status(all_phases=all_phases, route=route)


@verb(panel=MORE)
def demo(
    n: Annotated[int, typer.Option("-n", help="Number of ranks.")] = 4,
    epochs: Annotated[int | None, typer.Option(help="Rounds over the data.")] = None,
    code: Code = "reference",
    as_json: Json = False,
    phase: Annotated[
        int,
        typer.Option(
            help="1; 2: a model on 2 × 2; 3: your library; 4: a slow rank, a SIGKILL."
        ),
    ] = 1,
) -> int:
    """Four processes train on real digits and arrive at one process's weights."""
    from distlab.cli.demo import demo

    return demo(world_size=n, epochs=epochs, code=code, as_json=as_json, phase=phase)


verb(panel=MORE)(ddp)
verb(panel=MORE)(data)
verb(panel=MORE)(top)
verb(panel=MORE)(train)
verb(panel=MORE)(chaos)
verb(panel=MORE)(sim)
verb(panel=MORE)(scale)


@verb(panel=MORE)
def explain(
    asked: Annotated[
        str, typer.Argument(help="A name, a question, or a pasted error.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="List every name.")] = False,
) -> int:
    """A concept, a question, the last verdict, or a pasted error of torch."""
    from distlab.cli.explain import explain, piped

    return explain(asked or piped(), every=every)


@verb(panel=MORE)
def guide(
    name: Annotated[
        str, typer.Argument(help="A task, as 1.4, or a unit; else the current task.")
    ] = "",
) -> int:
    """Open the page that explains a task."""
    from distlab.cli.guide import guide

    return guide(name)


@verb(panel=MORE)
def mcp() -> int:
    """The tutor as a server for an assistant (MCP over standard input and output)."""
    from distlab.cli.mcp import mcp

    return mcp()


@verb(panel=MORE)
def quiz(
    phase: Annotated[
        int, typer.Argument(help="The number of a phase; else the current one.")
    ] = 0,
    answers: Annotated[
        str | None, typer.Option(help="All answers, with semicolons; else one by one.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same numbers again.")] = None,
) -> int:
    """The checked questions of a phase; your answers stay here, ungraded."""
    from distlab.cli.quiz import quiz

    return quiz(phase, answers=answers, seed=seed)


@verb(panel=MORE)
def hunt(
    milestone: Annotated[str, typer.Argument(help="A milestone, as 1.7.")] = "",
    line: Annotated[int | None, typer.Option(help="The line that is wrong.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Before the milestone has passed.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Another one.")] = False,
) -> int:
    """Find the one wrong line in a finished solution."""
    from distlab.cli.hunt import hunt

    return hunt(milestone, line=line, anyway=anyway, new=new)


@verb(panel=MORE)
def drill(
    seed: Annotated[int | None, typer.Option(help="The same fault again.")] = None,
    code: Code = "mine",
    as_json: Json = False,
) -> int:
    """A real training in which something goes wrong: does your 4.12 say what?"""
    from distlab.cli.drill import drill

    return drill(seed=seed, code=code, as_json=as_json)


@verb("score-test", panel=MORE)
def score_test(
    name: Annotated[str, typer.Argument(help="A unit, or one of its tasks.")] = "",
    file: Annotated[str, typer.Option(help="Another file of tests.")] = "",
    as_json: Json = False,
) -> int:
    """Write tests, and see which wrong solutions they catch."""
    from distlab.cli.score_test import score_test

    return score_test(name, file=file, as_json=as_json)


@verb(panel=MORE)
def use(
    side: Annotated[str, typer.Argument(help="mine, reference or auto.")] = "",
    names: Annotated[
        list[str] | None, typer.Argument(help="Units or tasks; else all.")
    ] = None,
) -> int:
    """Whose code is used where several units work together."""
    from distlab.cli.use import use

    return use(side, names or [])


@verb(panel=MORE)
def diff(
    task: Annotated[
        str, typer.Argument(help="Number, id or name; else the last checked.")
    ] = "",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Before it has passed.")
    ] = False,
) -> int:
    """Your function beside the reference's, once it has passed."""
    from distlab.cli.diff import diff

    return diff(task, anyway=anyway)


@verb(panel=MORE)
def update(
    unit: Annotated[str, typer.Argument(help="A unit; else all.")] = "",
) -> int:
    """Carry your code into newer templates; the old files are kept beside them."""
    from distlab.cli.update import update

    return update(unit)


@verb(panel=MORE)
def calibrate(
    out: Annotated[str, typer.Option(help="Where to write the table.")] = "",
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 20.0,
    as_json: Json = False,
) -> int:
    """Measure this machine's link for the simulator, and how well it then predicts."""
    from distlab.cli.calibrate import calibrate

    return calibrate(out=out, seconds=seconds, as_json=as_json)


@verb(panel=MORE)
def doctor(
    ranks: Annotated[
        int | None, typer.Option(help="Only: do so many ranks talk to each other?")
    ] = None,
    as_json: Json = False,
) -> int:
    """Whether this machine can run the course, and if not, why."""
    if ranks is not None:
        from distlab.cli.doctor_ranks import doctor_of_ranks

        return doctor_of_ranks(ranks, as_json=as_json)
    from distlab.cli.doctor import doctor

    return doctor(as_json=as_json)


@verb(panel=MORE)
def reset(
    unit: Annotated[str, typer.Argument(help="A unit, such as collectives.")] = "",
) -> int:
    """Start a unit's file over; the old file is kept beside it."""
    from distlab.cli.reset import reset

    return reset(unit)


for maintainers in (templates, mutants, bench):
    verb(panel=MAINTAINERS)(maintainers)
