"""Checks of task 3.30, `planning.step_memory`: the bytes of a GPU."""

from __future__ import annotations

from distlab.grading.checks.planning.asked import answers, expect_answers
from distlab.grading.checks.planning.questions import Call
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, on_ranks

TASK = "planning.step_memory"
LAYER = on_ranks(answers, function="layer_parameters")
STAGE = on_ranks(answers, function="stage_parameters")
ACTIVATIONS = on_ranks(answers, function="layer_activation_bytes")
MEMORY = on_ranks(answers, function="stage_memory")
STATES = ("weights_bytes", "gradients_bytes", "optimizer_bytes")


@clause(TASK, "C1", worlds=(1,), runs=[LAYER])
def matrices_are_split(runs: Runs) -> str | None:
    """With and without tensor ranks."""
    return expect_answers(runs, "layer_parameters")


@clause(TASK, "C2", worlds=(1,), runs=[STAGE], after=["C1"])
def the_ends_have_more(runs: Runs) -> str | None:
    """Every stage, also where the layers have a remainder."""
    return expect_answers(runs, "stage_parameters")


def _keeps_everything(call: Call) -> bool:
    return bool(call.arguments[-1] == "none")


def _keeps_less(call: Call) -> bool:
    return not _keeps_everything(call)


@clause(TASK, "C3", worlds=(1,), runs=[ACTIVATIONS])
def a_layer_keeps_activations(runs: Runs) -> str | None:
    """Without recomputation."""
    return expect_answers(runs, "layer_activation_bytes", chosen=_keeps_everything)


@clause(TASK, "C4", worlds=(1,), runs=[ACTIVATIONS], after=["C3"])
def recomputation_keeps_less(runs: Runs) -> str | None:
    """With it."""
    return expect_answers(runs, "layer_activation_bytes", chosen=_keeps_less)


@clause(TASK, "C5", worlds=(1,), runs=[MEMORY], after=["C1", "C2"])
def states_are_sharded(runs: Runs) -> str | None:
    """At every ZeRO stage, in several formats."""
    return expect_answers(runs, "stage_memory", *STATES)


@clause(TASK, "C6", worlds=(1,), runs=[MEMORY], after=["C3", "C4"])
def microbatches_in_flight_are_kept(runs: Runs) -> str | None:
    """On every stage, for 1F1B and interleaved schedules."""
    return expect_answers(runs, "stage_memory", "activations_bytes")
