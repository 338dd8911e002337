"""Checks of task 3.31, `planning.step_time`: the seconds of a step."""

from __future__ import annotations

from distlab.grading.checks.planning.asked import answers, expect_answers
from distlab.grading.clause import clauses
from distlab.grading.runs import Runs, on_ranks

TASK = "planning.step_time"
ASKED = {
    "C1": ("roofline_s", "mfu"),
    "C2": ("ring_s",),
    "C3": ("group_link",),
    "C4": ("tensor_s", "context_s", "pipeline_s"),
    "C5": ("exposed_data_s",),
    "C6": ("update_s", "step_time"),
}
AFTER = {
    "C4": ["C2", "C3"],
    "C5": ["C1", "C2", "C3"],
    "C6": ["C1", "C2", "C3", "C4", "C5"],
}


def _answers_are_right(clause_id: str, runs: Runs) -> str | None:
    return "; ".join(expect_answers(runs, function) for function in ASKED[clause_id])


for _name, _functions in ASKED.items():
    clauses(
        TASK,
        (_name,),
        _answers_are_right,
        worlds=(1,),
        runs=[on_ranks(answers, function=function) for function in _functions],
        after=AFTER.get(_name, ()),
    )
