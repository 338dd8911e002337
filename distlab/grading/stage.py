"""Where a learner's tests meet one solution: n simulated ranks, in a process apart.

The functions of a test file get what their parameters are called: `run`, and `unit` for
what needs no ranks.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from distlab.comm import Comm
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.grading.diagnosis import diagnose_finished, only_messages
from distlab.grading.kernel import perform_simulated
from distlab.grading.kit.rounds import ROUNDING, alternating
from distlab.grading.runs import Scenario
from distlab.grading.time_limit import no_longer_than
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, RankRecord
from distlab.runner.limits import MAX_RANKS
from distlab.sim import AlphaBeta
from distlab.sim import run as simulate

Program = Callable[[Comm, ModuleType], Any]
_SENDS = ("send", "isend", "sendrecv")
_TURN_S = 1.0  # for one rank without a call that waits
_TEST_S = 20.0  # for one test against one solution


class RanksFailedError(AssertionError):
    """The ranks of a run did not come to their end, or a message went wrong."""


class Result(list[Any]):
    """What each rank returned, and what the run cost.

    `messages` and `num_bytes` are what each rank sent, `sent_to` to which ranks, in
    order. `rounds` is the longest chain of messages, of which a rank sends one and
    receives one at a time; it counts messages of `message_bytes`, and is 0 where that
    was not said.
    """

    def __init__(
        self, values: list[Any], ranks: Sequence[RankRecord], rounds: int
    ) -> None:
        super().__init__(values)
        self.messages = [record.messages for record in ranks]
        self.num_bytes = [record.sent_bytes for record in ranks]
        self.sent_to = [
            [call["dst"] for call in record.calls() if call["op"] in _SENDS]
            for record in ranks
        ]
        self.rounds = rounds


class Stage:
    """`run` in a test: play `program(comm, unit)` on n ranks."""

    def __init__(self, module: ModuleType, builds: str, seed: int) -> None:
        self._module, self._builds, self._seed = module, builds, seed

    def __call__(self, program: Program, n: int, *, message_bytes: int = 0) -> Result:
        """Play the program; return what each rank returned.

        Raises:
            RanksFailedError: a rank raised, all ranks wait, a message did not fit its
                receive buffer, or was never waited for.
            ValueError: fewer than 1 or more than 64 ranks.
        """
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"{n} ranks: choose between 1 and {MAX_RANKS}")
        scenario = _in_rounds if message_bytes else _as_scenario
        done = simulate(
            partial(self._perform, scenario, program),
            n,
            net=AlphaBeta(alpha_s=0.0, bytes_per_s=message_bytes or math.inf),
            seed=self._seed,
            turn_limit_s=_TURN_S,
        )
        if done.outcome != "finished":
            raise RanksFailedError(f"{done.outcome}: {done.explanation}")
        try:
            diagnose_finished(done)
            if self._builds:
                only_messages(done)
        except NotYetError as error:
            raise RanksFailedError(error.message) from None
        rounds = math.ceil(done.time_s - ROUNDING) if message_bytes else 0
        return Result(list(done.values), done.ranks, rounds)

    def _perform(
        self, scenario: Scenario, program: Program, context: RankContext
    ) -> Any:
        values = {"program": program}
        return perform_simulated(self._module, scenario, values, self._builds, context)


def _as_scenario(context: RankContext, unit: ModuleType, program: Program) -> Any:
    return program(context.comm, unit)


def _in_rounds(context: RankContext, unit: ModuleType, program: Program) -> Any:
    with alternating(context) as comm:
        return program(comm, unit)


def play_tests(
    context: RankContext,
    tests: dict[str, str],
    jobs: list[tuple[str, dict[str, str], list[str]]],
    seed: int,
    to_the_end: bool,
) -> None:
    """Report of each solution, test by test: what the test said, "" where it passed.

    The program of that process; what it reports is (solution, test, what it said). With
    `to_the_end` a solution meets all of its tests, else those to the first that fails.
    """
    source = arrived(tests)
    for id_, parts, names in jobs:
        for name in names:
            context.report([id_, name, None])  # it may not live to say more
            said = _said(source, name, arrived(parts), seed)
            context.report([id_, name, said])
            if said and not to_the_end:
                break  # caught: no other test has to


def _said(tests: Any, name: str, solution: Any, seed: int) -> str:
    torch.manual_seed(seed)
    try:
        with no_longer_than(_TEST_S, f"it had not ended after {_TEST_S:g} s"):
            functions: dict[str, Any] = {"__name__": "tests"}
            exec(tests.code, functions)
            module = load_graft(solution, solution, ())
            given = {"run": Stage(module, solution.builds, seed), "unit": module}
            test = functions[name]
            test(**{p: given[p] for p in inspect.signature(test).parameters})
    except KeyError as error:
        return f"a test has the parameters run and unit, not {error}"
    except (Exception, SystemExit) as error:
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        return f"{what} (line {_line_of(error, str(tests.path))})"
    return ""


def _line_of(error: BaseException, path: str) -> int:
    """The last line of the test file that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return (lines and lines[-1]) or 0
