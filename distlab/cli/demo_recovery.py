"""The second half of `distlab demo --phase 4`: kill a process while you watch."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, show, waiting

if TYPE_CHECKING:  # they import torch, and the first line should not wait for it
    from distlab.chaos.judge import CellResult
    from distlab.chaos.play import ChaosRun
    from distlab.curriculum.choose import Part

UNIT = "fault_tolerance"
TASKS = tuple(f"{UNIT}.{name}" for name in ("save", "load", "full_state"))
CELLS = ("kill-worker@{}/restart", "kill-rank-0@{}/restart")
_LOOK_S = 0.1
_WHAT = {
    "detect and stop": "the launcher notices and stops the other two",
    "start": "three new processes import torch",
    "rendezvous": "they find each other",
    "restore": "they read, check and load the checkpoint",
    "first step": "they take the next step",
}


def demo_recovery(
    *, code: str = "reference", seed: int | None = None, quiet: bool = False
) -> tuple[int, dict[str, Any]]:
    """Kill a rank; return 0 if the end is the same, else 1, and the figures.

    If the learner hasn't written the checkpoints, run nothing and return 0.
    """
    missing = _missing() if code == "mine" else None
    if missing:
        if not quiet:
            show([("plain", line) for line in _not_yet(missing)])
        return 0, {"missing": f"{missing.number} {missing.task}"}
    seed = random.randrange(1 << 16) if seed is None else seed
    if not quiet:
        lines = (
            "Now three real processes train on handwritten digits, and they save a",
            "checkpoint every 4 steps. We kill one of them with SIGKILL, so it can't",
            "save anything else.",
            "",
        )
        show([("plain", line) for line in lines])
    from distlab.chaos.judge import RECOVERED

    result, run, unbroken = _play(code, seed, quiet)
    if not quiet:
        _tell(result, run, unbroken, is_own=code == "mine")
    data = {
        "status": result.status,
        "why": result.why,
        "what": result.what,
        "repeated_steps": result.num_lost,
        "segments": {name: round(s, 3) for name, s in result.segments.items()},
        "weights": _weights(run),
        "weights_unbroken": _weights(unbroken),
    }
    return int(result.status != RECOVERED), data


def _play(code: str, seed: int, quiet: bool) -> tuple[CellResult, ChaosRun, ChaosRun]:
    from distlab.chaos import play
    from distlab.chaos.judge import judge
    from distlab.chaos.matrix import ANYWHERE, cells
    from distlab.chaos.plan import Setting

    draw, setting = random.Random(seed), Setting(seed=seed, code=code)
    moment = draw.choice([moment for moment in ANYWHERE if moment != "epoch"])
    (cell,) = cells(draw.choice(CELLS).format(moment))
    with tempfile.TemporaryDirectory(prefix="distlab-demo-") as place:
        first, second = Path(place) / "killed", Path(place) / "unbroken"
        first.mkdir()
        second.mkdir()
        with _followed(first, quiet):
            run = play.play_cell(cell, setting, first)
        with waiting("running the same training again without a kill", quiet=quiet):
            unbroken = play.play_cell(None, setting, second)
    return judge(cell, setting, run, unbroken), run, unbroken


@contextmanager
def _followed(folder: Path, quiet: bool) -> Iterator[None]:
    """Show what the ranks write down while they train."""
    is_over = threading.Event()
    follower = threading.Thread(target=_follow, args=(folder, is_over), daemon=True)
    if not quiet:
        follower.start()
    try:
        yield
    finally:
        is_over.set()
        if not quiet:
            follower.join()


def _follow(folder: Path, is_over: threading.Event) -> None:
    from distlab.chaos.faults import FIRED
    from distlab.chaos.ledger import read_ledgers

    told: set[str] = set()
    begun = time.monotonic()

    def tell(key: str, t: float, text: str, style: str = "plain") -> None:
        if key not in told:
            told.add(key)
            show([(style, f"  {t - begun:5.1f} s  {text}")])

    while True:
        ends = is_over.is_set()
        lines, fired = read_ledgers(folder), folder / FIRED
        if fired.exists():
            one = json.loads(fired.read_text(encoding="utf-8"))
            text = f"rank {one['rank']} gets SIGKILL in step {one['step']}"
            events = [(one["t"], "fired", text, "fail")]
        else:
            events = []
        for line in lines:
            number = line["generation"]
            if line["what"] == "resumed" and line["rank"] == 0:
                where = f"from the checkpoint of step {line['step']}"
                text = where if line["step"] else "from step 0"
                text = f"start {number}: all ranks train, {text}"
                events.append((line["t"], f"start {number}", text, "plain"))
            if line["what"] == "ended" and line["rank"] == 0:
                text = f"step {line['step']}: finished; weights {line['weights']}"
                events.append((line["t"], "ended", text, "plain"))
        for t, key, text, style in sorted(events):
            tell(key, t, text, style)
        if ends:
            return
        is_over.wait(_LOOK_S)


def _tell(
    result: CellResult, run: ChaosRun, unbroken: ChaosRun, *, is_own: bool
) -> None:
    from distlab.chaos.judge import RECOVERED

    if result.status != RECOVERED:
        lines = [("fail", f"  It did not recover: {result.status}: {result.why}")]
        lines += [("dim", f"    {line}") for line in result.evidence]
        show([("", ""), *lines])
        return
    steps = f"{result.num_lost} step{'s' * (result.num_lost != 1)}"
    lines = [("", ""), ("plain", "  Time from the kill to every rank's next step:")]
    lines += [
        ("plain", f"  {seconds:7.2f} s  {_WHAT[name]}")
        for name, seconds in result.segments.items()
    ]
    lines += [
        (
            "plain",
            f"  {result.recovery_s:7.2f} s  in total, and {steps} had to be repeated",
        ),
        ("", ""),
        ("pass", "  The result is the same as without the kill."),
        ("plain", "  Without a kill, the same run ends with the weights"),
        ("plain", f"  {_weights(unbroken)}, which are bit-for-bit the same."),
        ("", ""),
    ]
    if is_own:
        text = "  ◆ Your own code saved, checked and loaded the checkpoints."
        lines.append(("pass", text))
    else:
        own = command("demo --phase 4 --code mine")
        lines.append(("plain", f"  To use your own checkpoints (4.3–4.5): {own}"))
    lines.append(("plain", f"  To try all the other faults: {command('chaos')}"))
    show(lines)


def _weights(run: ChaosRun) -> str:
    found = [line["weights"] for line in run.lines if line["what"] == "ended"]
    return str(found[0]) if found else ""


def _missing() -> Part | None:
    """Return the first task that the learner's code lacks."""
    from distlab.curriculum import load_curriculum
    from distlab.curriculum.choose import chosen_unit

    for part in chosen_unit(load_curriculum(), UNIT, "mine").parts:
        is_lent = part.whose == "reference" and part.why != "as set"
        if part.task in TASKS and is_lent:
            return part
    return None


def _not_yet(part: Part) -> tuple[str, ...]:
    """Say what the demo adds once you have written 4.3 to 4.5."""
    return (
        "  The second half of this demo kills a process and continues from your own",
        f"  checkpoints (4.3–4.5). You still have to write {part.number} {part.task}.",
        f"  Next: {command(f'check {part.number}')}",
    )
