"""Run a test's body on simulated ranks: threads of pytest's process, one at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from distlab.flight import find_hang, page
from distlab.flight.simulated import records_of
from distlab.pytest_plugin.body import called, words_of
from distlab.pytest_plugin.job import RankedTest, Setting
from distlab.pytest_plugin.told import Result
from distlab.runner import RunnerError
from distlab.sim import torch as sim_torch


def run(job: RankedTest, setting: Setting) -> Result:
    """Call the body on `setting.world_size` simulated ranks.

    Each has its own copies of the arguments, as real ranks do. What a module keeps is
    shared, and communication takes no time.
    """
    ends: dict[int, Mapping[str, Any]] = {}

    def body() -> None:
        rank = int(os.environ["RANK"])
        function, _ = called(job, rank)
        try:
            function()
        except BaseException as error:
            if type(error).__module__.startswith("distlab."):
                raise  # the simulator's own
            ends[rank] = words_of(job, error)
            raise RuntimeError(str(error)) from error
        ends[rank] = {"outcome": "passed"}

    try:
        done = sim_torch.run(
            body,
            setting.world_size,
            wall_limit_s=setting.timeout_s,
            turn_limit_s=setting.timeout_s,
        )
    except (RunnerError, ValueError) as error:
        pytest.fail(f"the simulated ranks can't run: {error}", pytrace=False)
    result = Result(world_size=setting.world_size, ends=ends)
    result.output = {record.rank: record.output for record in done.ranks}
    if not _has_more(ends) and done.outcome != "finished":
        result.report = f"{done.outcome}: {done.explanation}"
        if done.outcome == "deadlock":
            ended = [r.rank for r in done.ranks if r.status == "finished"]
            records = replace(records_of(done), ended=frozenset(ended), is_live=True)
            lines = [line for _, line in page(records, find_hang(records))]
            result.report = "\n".join([f"{done.outcome}: {lines[0]}", *lines[1:]])
    return result


def _has_more(ends: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return True if a body has raised: that says more than how the others ended."""
    return any(words["outcome"] != "passed" for words in ends.values())
