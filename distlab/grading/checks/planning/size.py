"""Checks of task 3.29, `planning.model_size`: weights and operations."""

from __future__ import annotations

from distlab.grading.checks.planning.asked import answers, expect_answers
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, on_ranks

TASK = "planning.model_size"
SIZES = [on_ranks(answers, function="model_size")]


@clause(TASK, "C1", worlds=(1,), runs=SIZES)
def weights_are_counted(runs: Runs) -> str | None:
    """Tensor by tensor, for models of any shape."""
    return expect_answers(runs, "model_size", "parameters")


@clause(TASK, "C2", worlds=(1,), runs=SIZES)
def products_with_weights_are_counted(runs: Runs) -> str | None:
    """The same models."""
    return expect_answers(runs, "model_size", "weight_flops")


@clause(TASK, "C3", worlds=(1,), runs=SIZES)
def attention_is_counted(runs: Runs) -> str | None:
    """The same models, and sequences of other lengths."""
    return expect_answers(runs, "model_size", "attention_flops")
