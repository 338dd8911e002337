"""`distlab drill`: break a training, and compare your diagnosis with the fault."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, show, show_json, waiting

if TYPE_CHECKING:  # it imports torch
    from distlab.given.drill import Incident, RecordedRun

RIGHT, WRONG = 0, 1
TRIES = 3
FIELDS = ("what", "rank", "step", "action", "steps_lost")


def drill(*, seed: int | None = None, code: str = "mine", as_json: bool = False) -> int:
    """Inject a fault drawn from the seed; return 0 if `incident` is right about it.

    Raises:
        SourceError, CurriculumError: we can't read the code.
        OSError: the ranks can't run here.
    """
    from distlab.chaos.incidents import draw
    from distlab.curriculum import load

    unit = load("drill", code)
    seed = random.randrange(1 << 16) if seed is None else seed
    fault = draw(seed)
    if not as_json:
        lines = (
            "Four processes train on handwritten digits, and something may go wrong.",
            "Then your `incident` reads the records that they and their agent left.",
            "",
        )
        show([("plain", line) for line in lines])
    with waiting("training, which takes up to a minute", quiet=as_json):
        run = clear_run(fault)
    answer, error = ask(unit, run)
    expected = truth(run, fault.cause)
    data = {
        "seed": seed,
        "injected": fault._asdict(),
        "expected": expected._asdict(),
        "answer": None if answer is None else answer._asdict(),
        "error": error,
        "is_right": answer == expected,
    }
    if as_json:
        show_json(data)
    else:
        _tell(run, answer, expected, error, seed)
    return RIGHT if answer == expected else WRONG


def clear_run(fault: Any) -> RecordedRun:
    """Make a run that shows the injected fault and nothing else.

    On a busy machine a rank may be late for other reasons, and the records show that.

    Raises:
        TimeoutError: no run was clear enough.
    """
    from distlab.curriculum import load

    reference = load("drill", "reference")
    for _ in range(TRIES):
        run = record_run(fault)
        if ask(reference, run)[0] == truth(run, fault.cause):
            return run
    raise TimeoutError(
        f"{TRIES} runs showed something other than the injected fault, probably "
        "because this machine is too busy for four ranks"
    )


def record_run(fault: Any) -> RecordedRun:
    """Run real processes with this fault, and leave none of them running."""
    from distlab.chaos.incidents import played
    from distlab.data.make import make
    from distlab.given.drill import Event, RecordedRun, Report
    from distlab.processes.tree import leaving_none

    with tempfile.TemporaryDirectory(prefix="distlab-drill-") as place, leaving_none():
        data = Path(place) / "digits"
        make(data, "digits")
        reports, events = played(fault, data)
    return RecordedRun([Report(*r) for r in reports], [Event(*e) for e in events])


def truth(run: RecordedRun, cause: Any) -> Incident:
    """Return the right answer for the injected fault."""
    from distlab.curriculum import load
    from distlab.given.drill import ACTIONS, Incident

    lost = load("drill", "reference").steps_lost(*run, cause)
    return Incident(cause.what, cause.rank, cause.step, ACTIONS[cause.what], lost)


def ask(unit: Any, run: RecordedRun) -> tuple[Incident | None, str]:
    """Return the answer of the unit's `incident`, or why there is none."""
    from distlab.given.drill import Incident

    try:
        answer = Incident(*unit.incident(*run))
    except Exception as error:  # the learner's code may raise anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return answer, ""


def _tell(
    run: RecordedRun,
    answer: Incident | None,
    expected: Incident,
    error: str,
    seed: int,
) -> None:
    last = max((report.step for report in run.reports), default=0)
    lines = [
        ("plain", f"The newest report is about step {last}. These are the last events:")
    ]
    for event in run.events[-8:]:
        where = f"rank {event.rank}" if event.rank >= 0 else "agent"
        step = f"step {event.step}" if event.step >= 0 else ""
        row = f"  {event.time_s:6.1f} s  {where:<7} {event.kind:<8} {step:<8}"
        lines.append(("dim", f"{row} {event.text}".rstrip()[:79]))
    lines.append(("", ""))
    if answer is None:
        lines.append(("fail", f"`incident` gave no answer: {error}"))
    for name in FIELDS:
        right = getattr(expected, name)
        said = "–" if answer is None else getattr(answer, name)
        style = "pass" if said == right and answer is not None else "fail"
        row = f"  {name:<11} you: {said!s:<12} injected: {right}"
        lines.append((style, row))
    again = command(f"drill --seed {seed}")
    lines += [("", ""), ("dim", f"to inject the same fault again: {again}")]
    if answer == expected:
        lines.append(("pass", "◆ That's right. Try another seed to get another fault."))
    show(lines)
