"""Judge the record of a run: compute the result of its cell without running anything.

    recovered           the job restarted, and ended like an unbroken run
    went on             it ended like an unbroken run, and nothing had to restart
    refused             it stopped with a one-line message, because it couldn't continue
    anything else       a defect: hung, wrong weights, wrong samples, lost checkpoint …

A run ends "like an unbroken run" if every rank has the same weights, bit for bit, and
the steps that led to them used the same samples, each of them once per epoch. If the
number of ranks changes, sums are added in a different order, so we only require the
weights to be close (CLOSE).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from distlab.chaos.matrix import Cell
from distlab.chaos.plan import Setting
from distlab.chaos.play import ChaosRun

RECOVERED, WENT_ON, REFUSED = "recovered", "went on", "refused"
HUNG, WEIGHTS, SAMPLES = "hung", "wrong weights", "wrong samples"
LOST, LEFT, FAILED = "lost checkpoint", "processes left", "failed"
NOT_FIRED, NO_EFFECT = "the fault did not happen", "the fault did nothing"
STOPPED = "restarted without need"
GOOD = (RECOVERED, WENT_ON, REFUSED)
SEGMENTS = ("detect and stop", "start", "rendezvous", "restore", "first step")
CLOSE = 1e-9  # of float64 weights, after 58 steps
_LAST_WORDS = ("distlab.launch: ", "[distlab] gave up")
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result of a cell."""

    cell: Cell
    status: str
    why: str = ""  # for a defect or a refusal
    what: str = ""  # what the fault was
    seconds: float = 0.0  # the whole run
    num_lost: int = 0  # steps that were done again
    segments: dict[str, float] = field(default_factory=dict)  # s, of a recovery
    evidence: tuple[str, ...] = ()  # what was printed, for a defect

    @property
    def is_good(self) -> bool:
        """True if the result is the one that we require."""
        return self.status in GOOD

    @property
    def recovery_s(self) -> float:
        """Seconds from the fault to all ranks' next step; 0 without a restart."""
        return sum(self.segments.values())


def judge(
    cell: Cell, setting: Setting, run: ChaosRun, unbroken: ChaosRun
) -> CellResult:
    """Return the result of a cell; `unbroken` is a run without a fault."""
    status, why = _status(cell, setting, run, unbroken)
    fired = run.fired or {}
    what = ""
    if fired:
        what = f"rank {fired['rank']}, step {fired['step']}: {fired['what']}"
    segments = segments_of(run) if status == RECOVERED else {}
    evidence = () if status in (RECOVERED, WENT_ON) else _evidence(run)
    return CellResult(
        cell=cell,
        status=status,
        why=why,
        what=what,
        seconds=run.seconds,
        num_lost=num_repeated(run),
        segments=segments,
        evidence=evidence,
    )


def _status(
    cell: Cell, setting: Setting, run: ChaosRun, unbroken: ChaosRun
) -> tuple[str, str]:
    if run.is_hung:
        return HUNG, "the run did not end by itself"
    if run.fired is None:
        return NOT_FIRED, "the run ended before it"
    if run.left:
        return LEFT, "; ".join(run.left)
    lost = lost_checkpoint(run)
    if lost:
        return LOST, lost
    if not run.codes or run.codes[-1] != 0:
        return _of_failure(cell, run)
    wrong = wrong_samples(run, unbroken, setting)
    if wrong:
        return SAMPLES, wrong
    wrong = wrong_weights(cell, run, unbroken, setting)
    if wrong:
        return WEIGHTS, wrong
    num_starts = len(generations(run.lines))
    if cell.goes_on and num_starts > 1:
        return STOPPED, f"{num_starts} starts of all ranks"
    if not cell.goes_on and (num_starts == 1 or cell.refuses):
        return NO_EFFECT, "the run went on as if nothing had happened"
    return (RECOVERED if num_starts > 1 else WENT_ON), ""


def _of_failure(cell: Cell, run: ChaosRun) -> tuple[str, str]:
    code = run.codes[-1] if run.codes else -1
    texts = [text for _, text in run.said]
    if any("Traceback" in text for text in texts):
        return FAILED, f"exit code {code}, with a traceback of the launcher"
    told = [text for text in texts if text.startswith(_LAST_WORDS)]
    if not told:
        return FAILED, f"exit code {code}, and the launcher did not say why"
    if not cell.refuses:
        return FAILED, f"exit code {code}: {told[-1]}"
    return REFUSED, told[-1].partition(" ")[2]


# ── what an unbroken run is compared in ─────────────────────────────────────────────


def generations(lines: Iterable[Line]) -> list[tuple[int, int]]:
    """Return the starts of the job in order, each as (launch, generation)."""
    return sorted({(line["launch"], line["generation"]) for line in lines})


def effective_samples(run: ChaosRun) -> dict[int, list[int]]:
    """Return for each step the samples of all ranks when it ran for the last time."""
    groups: dict[int, dict[tuple[int, int], list[int]]] = {}
    for line in _of(run, "step"):
        start = line["launch"], line["generation"]
        groups.setdefault(line["step"], {}).setdefault(start, []).extend(
            line["samples"]
        )
    return {step: sorted(own[max(own)]) for step, own in groups.items()}


def wrong_samples(run: ChaosRun, unbroken: ChaosRun, setting: Setting) -> str:
    """Say what is wrong with the samples behind the weights; "" if nothing is."""
    found, wanted = effective_samples(run), effective_samples(unbroken)
    size = setting.steps_per_epoch
    for epoch in range(setting.num_epochs):
        steps = range(epoch * size + 1, (epoch + 1) * size + 1)
        counts = Counter(sample for step in steps for sample in found.get(step, []))
        for sample in range(setting.num_samples):
            if counts[sample] != 1:
                times = f"{counts[sample]} times"
                return f"sample {sample} was trained with {times} in epoch {epoch + 1}"
    for step, samples in wanted.items():
        if found.get(step) != samples:
            return f"step {step} had other samples"
    return ""


def wrong_weights(
    cell: Cell, run: ChaosRun, unbroken: ChaosRun, setting: Setting
) -> str:
    """Say what is wrong with the weights at the end; "" if nothing is.

    The order of additions depends on the number of ranks. If that number changes, the
    weights must be close, otherwise they must be bit-equal.
    """
    last = generations(run.lines)[-1]
    ends = {
        line["rank"]: line
        for line in _of(run, "ended")
        if (line["launch"], line["generation"]) == last
    }
    size = setting.num_ranks
    if cell.is_resized:
        size = max((line["size"] for line in ends.values()), default=1)
    if len(ends) != size:
        return f"{len(ends)} of {size} ranks came to the end"
    if len({line["weights"] for line in ends.values()}) > 1:
        return "the ranks have different weights"
    (whole, *_), own = _of(unbroken, "ended"), ends[0]
    is_same = own["weights"] == whole["weights"]
    if cell.is_resized:
        pairs = zip(own["projections"], whole["projections"], strict=True)
        is_same = all(abs(a - b) <= CLOSE * max(1.0, abs(b)) for a, b in pairs)
    return "" if is_same else "the weights are not those of the unbroken run"


def lost_checkpoint(run: ChaosRun) -> str:
    """Name a checkpoint that was complete, but that a later start didn't use."""
    damaged = (run.fired or {}).get("damaged", -1)
    newest = 0
    for line in run.lines:
        if line["what"] == "saved" and line["step"] != damaged:
            newest = max(newest, line["step"])
        elif line["what"] == "resumed" and line["step"] < newest:
            return f"step {newest} was saved, and a start went on from {line['step']}"
    return ""


def num_repeated(run: ChaosRun) -> int:
    """Return how many steps some rank has done more than once."""
    counts = Counter((line["rank"], line["step"]) for line in _of(run, "step"))
    return len({step for (_, step), count in counts.items() if count > 1})


# ── how long it took ────────────────────────────────────────────────────────────────


def segments_of(run: ChaosRun) -> dict[str, float]:
    """Return the seconds from the fault to the next step of all ranks, by segment."""
    assert run.fired is not None
    fired, last = float(run.fired["t"]), generations(run.lines)[-1]
    own = [line for line in run.lines if (line["launch"], line["generation"]) == last]
    rows = [row for row in run.recoveries if row["completed_s"] > fired]
    if rows:
        names = ("joined_s", "joined_s", "formed_s", "restored_s", "completed_s")
        marks = [fired, *(rows[-1][name] for name in names)]
    else:
        starts = [line["t"] for line in own if line["what"] == "started"]
        begun = _when_all(own, "started") or _when_all(own, "resumed")
        first_start = min(starts, default=begun)
        said = [t for t, text in run.said if "restart " in text and t < first_start]
        stopped = said or run.launched[1:] or [first_start]
        marks = [fired, stopped[-1], begun, _when_all(own, "met") or begun]
        marks += [_when_all(own, "resumed"), _when_all(own, "step")]
    spans = (end - begin for begin, end in pairwise(marks))
    return dict(zip(SEGMENTS, spans, strict=True))


def _when_all(lines: Iterable[Line], what: str) -> float:
    """Return when every rank had done it at least once; 0 if none has."""
    firsts: dict[int, float] = {}
    for line in lines:
        if line["what"] == what:
            firsts.setdefault(line["rank"], line["t"])
    return max(firsts.values(), default=0.0)


def _of(run: ChaosRun, what: str) -> list[Line]:
    return [line for line in run.lines if line["what"] == what]


def _evidence(run: ChaosRun) -> tuple[str, ...]:
    return (*(text for _, text in run.said[-12:]), *run.logs)
