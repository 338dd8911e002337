"""Checks of task 2.13, `pipeline_parallel.free`: what is kept, and what is waited for.

First `free` alone, with sends that only record what is done to them; then a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.pipeline_parallel.cases import all_cases, finished
from distlab.grading.checks.pipeline_parallel.clock import (
    Schedules,
    all_then_all,
    in_turns,
    in_words,
    peak,
)
from distlab.grading.checks.pipeline_parallel.execute import (
    expect_no_loss_kept,
    run_schedules,
)
from distlab.grading.checks.pipeline_parallel.kept import expect_let_go
from distlab.grading.checks.pipeline_parallel.race import (
    BACKWARD_MS,
    FORWARD_MS,
    RACED,
    raced,
    races,
)
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence, place
from distlab.sim.plans import closed_forms as forms

STAGES, MICROBATCHES = 4, 8  # more are played in tests/workbench
CHUNKED, REVERSED = "interleaved 1F1B", "the last microbatch backward first"
SCHEDULES = ("GPipe", "1F1B", CHUNKED, REVERSED)


def _schedules(name: str, n: int) -> Schedules:
    if name == REVERSED:
        forward = [("F", number, 0) for number in range(3)]
        return [[*forward, *(("B", number, 0) for number in (2, 0, 1))]] * n
    if name == "GPipe":
        return all_then_all(n, 4)
    return in_turns(n, 2 * n, 1 + (name == CHUNKED))


class _Send:
    """A Work that only records whether wait() was called."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""
        self.waited = True

    def is_completed(self) -> bool:
        """False: free() is to know it from its schedule."""
        return False


def free_alone(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, str]]:
    """By schedule, the first thing that free() did wrong; "" where there is none."""
    results = []
    code = getattr(unit.free, "__code__", None)
    at = place((code.co_filename, code.co_firstlineno)) if code else ""
    for name in SCHEDULES:
        n = context.world_size
        schedule = _schedules(name, n)[context.rank]
        first = {"waited": "", "kept": "", "dropped": "", "at": at}
        for kind, sentence in _flaws(unit, schedule, context.rank, n):
            first[kind] = first[kind] or sentence
        results.append(first)
    return results


def _flaws(
    unit: ModuleType, schedule: Any, rank: int, n: int
) -> Iterator[tuple[str, str]]:
    """What `free` does wrong in one rank's schedule, in order."""
    num_stages = n * (1 + max(chunk for _, _, chunk in schedule))
    kept: dict[Any, Any] = {}
    sends: dict[Any, Any] = {}
    all_sends: dict[Any, _Send] = {}
    expected: set[Any] = set()
    chunks = 1 + max(entry[2] for entry in schedule)
    for entry in schedule:
        action, stage = unit.Action(*entry), entry[2] * n + rank
        key, after = (entry[2], entry[1]), f"after {in_words(entry)},"
        forward = action._replace(kind="F")
        if action.kind == "F":
            kept[key] = torch.zeros(1), torch.zeros(1)
            expected.add(key)
        else:
            expected.discard(key)
        if stage < num_stages - 1 if action.kind == "F" else stage > 0:
            sends[action] = all_sends[action] = _Send()
        unit.free(action, kept, sends)
        for other, send in all_sends.items():
            if other not in sends and not send.waited:
                what = f"the send of {_sent(other, chunks)}"
                does = f"`free` removes {what} without wait()"
                yield "dropped", f"{after} {does}, expected it to wait first"
        for other, send in all_sends.items():
            received = other.kind == "F" and other[1:][::-1] not in expected
            if send.waited and not received:
                does = f"`free` waits for the send of {_sent(other, chunks)}"
                yield "waited", f"{after} {does}, expected no wait yet"
        if action.kind == "B" and forward in sends:
            what = f"the send of {_sent(forward, chunks)} is still in `sends`"
            yield "kept", f"{after} {what}, expected `free` to remove it"
        if action.kind == "B" and key in kept:
            what = "`kept` still has an entry for that microbatch"
            yield "kept", f"{after} {what}, expected `free` to remove it"


def _sent(action: Any, chunks: int) -> str:
    """What an action has sent, in words."""
    where = f" (chunk {action.chunk})" if chunks > 1 else ""
    what = "output" if action.kind == "F" else "gradient"
    return f"microbatch {action.microbatch}'s {what}{where}"


def _expect_free(runs: Runs, kind: str) -> None:
    run = runs.finished(free_alone)
    for number, name in enumerate(SCHEDULES):
        for rank, value in enumerate(run.values):
            if sentence := value[number][kind]:
                slug, rule = _MEANS[kind]
                at = value[number]["at"]
                raise NotYetError(
                    f"with {name} on rank {rank}, {sentence}",
                    slug=slug,
                    evidence=(Evidence(rank=rank, state="free", where=at),),
                    rule=rule,
                    fatal=kind == "dropped",
                )


_MEANS = {
    "waited": (
        "needless-waiting",
        "a send has arrived for certain when the microbatch's gradient has come back",
    ),
    "dropped": (
        "never-waited",
        "a send may end unfinished if its Work is dropped: call wait() when you remove "
        "it from sends",
    ),
    "kept": (
        "",
        "after a backward: remove that microbatch from kept, and the send of its "
        "output from sends; a send that is removed must be waited for",
    ),
}


@clause(
    "pipeline_parallel.free",
    "C1",
    worlds=(3,),
    runs=[on_ranks(free_alone), on_ranks(run_schedules)],
    later=races(STAGES, MICROBATCHES),
)
def no_needless_waiting(runs: Runs) -> str | None:
    """On simulated ranks GPipe and 1F1B take no longer than their formula says.

    Less is for who sends the gradient of the input before that of the weight is there.
    """
    _expect_free(runs, "waited")
    try:
        finished(runs, run_schedules, all_cases)
    except NotYetError as error:
        if error.slug == "never-waited":
            _expect_free(runs, "dropped")  # else execute is to blame
        raise
    report = raced(runs, STAGES, MICROBATCHES)
    formula_s = forms.gpipe_s(STAGES, MICROBATCHES, FORWARD_MS, BACKWARD_MS) / 1000
    kept = ""
    for number, name in enumerate(RACED):
        took_s = max(value[number]["time_s"] for value in report)
        if round(1e12 * took_s) > round(1e12 * formula_s):
            late = (
                f"on {STAGES} simulated ranks, {name} with {MICROBATCHES} microbatches "
                f"takes {1000 * took_s:.0f} ms, expected {1000 * formula_s:.0f} ms"
            )
            _expect_no_more_runs([value[number]["runs"] for value in report], late)
            raise NotYetError(
                late,
                slug="needless-waiting",
                rule="start a send and go on; wait for it when all is done",
            )
        peaks = [value[number]["peak"] for value in report]
        kept += f", {name} keeps {peaks[0]} on rank 0" + _one_more(name, peaks)
    return f"{STAGES} × {MICROBATCHES}, simulated: {1000 * took_s:.0f} ms{kept}"


def _one_more(name: str, peaks: list[int]) -> str:
    """What the note says of a rank that keeps more than its schedule needs."""
    flights = [peak(schedule) for schedule in RACED[name](STAGES, MICROBATCHES)]
    for rank, (kept, flight) in enumerate(zip(peaks, flights, strict=True)):
        if kept > flight:
            where = f", {kept} on rank {rank}" if rank else ""
            return f"{where}, not {flight}: a name in execute still holds one"
    return ""


def _expect_no_more_runs(runs: list[int], late: str) -> None:
    rank = runs.index(max(runs))
    if runs[rank] > MICROBATCHES:
        raise NotYetError(
            f"{late}: rank {rank} runs {runs[rank]} forwards, expected {MICROBATCHES}",
            slug="stage-runs-again",
            rule="keep the output of the forward: backward starts at it",
        )


@clause(
    "pipeline_parallel.free",
    "C2",
    worlds=(3, 4),
    runs=[on_ranks(run_schedules), on_ranks(free_alone)],
    later=[on_ranks(run_schedules, look=True)],
)
def nothing_is_kept(runs: Runs) -> str | None:
    """No more graphs alive than the schedule has microbatches in flight.

    One more is forgiven if backward() has emptied it: a variable may have its name,
    until it is needed for the next one. The note of C1 tells of it.
    """
    run = finished(runs, run_schedules, all_cases)
    expect_no_loss_kept(runs, run)
    every = list(enumerate(all_cases(runs.world_size)))
    for number, case in every:
        wanted = [peak(schedule) for schedule in case.schedules]
        peaks = [
            graphs if graphs > w + 1 else full
            for (full, graphs), w in zip(
                [value[number]["kept"] for value in run.values], wanted, strict=True
            )
        ]
        if any(p > w for p, w in zip(peaks, wanted, strict=True)):
            total = len(case.sizes) * case.num_chunks
            over = next(rank for rank, w in enumerate(wanted) if peaks[rank] > w)
            raise NotYetError(
                f"{case.said} rank {over} keeps {peaks[over]} microbatches, expected "
                f"{wanted[over]}, as many as are in flight",
                slug="activations-kept" if set(peaks) == {total} else "",
                evidence=[
                    (
                        rank,
                        "kept" if p > w else "right",
                        f"{p} of {total} at once, {w} in flight",
                    )
                    for rank, (p, w) in enumerate(zip(peaks, wanted, strict=True))
                ],
                rule="after its backward drop x, output and everything that holds "
                "them; retain_graph=True holds them too",
            )
    # In 1F1B, before GPipe, it costs memory; and two microbatches tell too little.
    for number, case in reversed([e for e in every if len(e[1].sizes) > 2]):
        left = [value[number]["left"] for value in run.values]
        expect_let_go(case.name, case.schedules, left)
    _expect_free(runs, "kept")
    return None
