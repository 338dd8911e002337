"""How long all ranks together take with the schedules of tasks 2.10, 2.14 and 2.21."""

from __future__ import annotations

from functools import partial

from distlab.grading.checks.pipeline_parallel.clock import (
    Entry,
    in_words,
    lead,
    named,
    needs,
    play_schedules,
)
from distlab.grading.checks.pipeline_parallel.plans import (
    SchedulePlan,
    clause_of,
    complete_plans,
)
from distlab.grading.runs import Runs
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence
from distlab.sim.plans import closed_forms as forms

TIMES = ((1, 2), (2, 1), (1, 1))  # t_f and t_b


def _judge_time(name: str, runs: Runs) -> str:
    note = ""
    for plan in complete_plans(runs, name):
        for forward, backward in TIMES:
            played = play_schedules(plan.schedules, plan.v, forward, backward)
            if played.stuck:
                raise _stuck(plan, played.stuck)
            enough = round(_formula(plan, forward, backward))
            if played.time != enough:
                raise _slow(plan, played.time, enough, forward, backward)
        note = f"{plan.setting}: {played.time} units for t_f = t_b = 1, as the formula"
    return note


def _formula(plan: SchedulePlan, forward: int, backward: int) -> float:
    if plan.v == 1:
        return forms.gpipe_s(plan.n, plan.m, forward, backward)
    return forms.interleaved_s(plan.n, plan.m, plan.v, forward, backward)


def _stuck(
    plan: SchedulePlan, stuck: tuple[tuple[int, Entry, str], ...]
) -> NotYetError:
    lines = tuple(
        Evidence(rank, "waits", f"{named(entry)} needs {needed}")
        for rank, entry, needed in stuck
    )
    rank, entry, _ = stuck[0]
    need = needs(entry, rank, plan.n, plan.v)
    assert need
    kind, number, stage = need
    awaited = in_words((kind, number, stage // plan.n))
    return NotYetError(
        f"{plan.said} rank {rank} waits forever for {awaited} on rank "
        f"{stage % plan.n}, which never runs",
        slug="schedules-do-not-fit",
        evidence=lines,
        rule="follow the waits from rank to rank: they form a cycle",
        kind="DEADLOCK",
    )


def _slow(
    plan: SchedulePlan, time: int, enough: int, forward: int, backward: int
) -> NotYetError:
    same = all(
        [e for e in s if e[0] == k] == [e for e in plan.schedules[0] if e[0] == k]
        for s in plan.schedules
        for k in "FB"
    )
    short = [
        rank
        for rank, schedule in enumerate(plan.schedules)
        if lead(schedule) < min(plan.v * plan.n - rank, plan.m * plan.v)
    ]
    slug = "warmup-too-short" if short and same else ""
    return NotYetError(
        f"{plan.said} the batch takes {time} time units, expected {enough}, if a "
        f"forward takes {forward} and a backward {backward}",
        slug=slug,
        evidence=plan.table(),
        rule=f"rank {short[0]} runs its first backward after "
        f"{lead(plan.schedules[short[0]])} forwards: which forwards could it run while "
        "it waits?"
        if slug
        else "draw the schedules, and look for a rank that waits",
    )


for _name, _clause_id in (
    ("gpipe", "C3"),
    ("one_f_one_b", "C2"),
    ("interleaved", "C2"),
):
    clause_of(_name, _clause_id)(partial(_judge_time, _name))
