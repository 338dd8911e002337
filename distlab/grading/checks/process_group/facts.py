"""What was known when a Launcher of 3.18 decided otherwise than it is due.

No diagnosis: each sentence is true of the event, whatever the mistake is.
"""

from __future__ import annotations

from collections.abc import Iterable
from signal import SIGTERM

from distlab.grading.checks.process_group.lives import LauncherContract
from distlab.grading.kit.launcher_actions import Fact, signal_name


def facts(
    contract: LauncherContract,
    event: Fact,
    now_s: float,
    expected: list[Fact],
    actual: list[Fact],
) -> str:
    """The rule that decides here, with its ranks and times, or nothing.

    `contract` has met the event: a generation that is due has begun.
    """
    wanted, given = ({action[0] for action in acts} for acts in (expected, actual))
    if "signal" in wanted:
        return _of_signals(contract, event, now_s, expected, actual)
    if "start" in wanted:
        return _of_start(contract, now_s, given, actual)
    if "finish" in wanted:
        return _of_finish(contract, now_s, expected[0][1], given)
    if given & {"start", "finish"}:
        return f"{_ranks(contract.alive)} not ended yet: wait for the last one"
    if given == {"signal"} and contract.cause:
        return "these processes were asked to stop already: once in each generation"
    return "nothing has failed: the others go on" if "signal" in given else ""


def late_facts(contract: LauncherContract, asked_s: list[float]) -> str:
    """The same where no Tick came when SIGKILL was due; `asked_s` are the WakeAts."""
    if not asked_s:
        return "the launcher reads no clock: ask for the Tick with a WakeAt"
    if asked_s[-1] < contract.kill_at_s:
        return "WakeAt takes a time, not a duration: that of the event plus grace_s"
    return "SIGKILL is due grace_s after the first failure; later ones do not move it"


def _of_signals(
    contract: LauncherContract,
    event: Fact,
    now_s: float,
    expected: list[Fact],
    actual: list[Fact],
) -> str:
    number: int = expected[0][2]
    to = {action[1] for action in actual if action[0] == "signal"}
    if ended := sorted(to - contract.alive):
        return f"{_ranks(ended)} ended: signals go to processes that are alive"
    if {"start", "finish"} & {action[0] for action in actual}:
        return f"{_ranks(contract.alive)} not ended yet: stop them, and wait"
    sent = {action[2] for action in actual if action[0] == "signal"}
    if number == SIGTERM and sent - {number}:
        return "SIGTERM first: a process has grace_s to end by itself"
    if number == SIGTERM and not to:
        what = "interruption" if event[0] == "interrupted" else "failure"
        return f"this is the first {what} of the generation: those alive are stopped"
    if missing := sorted(contract.alive - to):
        due_s = contract.last_kill_at_s
        at = f"kill_at_s is {due_s:.4g} s, and it is {now_s:.4g} s: "
        name = signal_name(number)
        return at * (number != SIGTERM) + f"{_ranks(missing)} no {name} yet"
    return ""


def _of_start(
    contract: LauncherContract, now_s: float, given: set[str], actual: list[Fact]
) -> str:
    n, generation = contract.script.world_size, contract.generation
    if "finish" in given or not given:
        before = contract.restarts_s[:-1]
        return f"{_counted(contract, before, now_s)}: one more is allowed"
    starts = [action[1:] for action in actual if action[0] == "start"]
    if {number for _, number in starts} - {generation}:
        return f"this is start number {generation} of all ranks: so is its generation"
    if sorted(rank for rank, _ in starts) != list(range(n)):
        return f"all {n} ranks start, also those that had ended with 0"
    return ""


def _of_finish(
    contract: LauncherContract, now_s: float, code: int, given: set[str]
) -> str:
    if not contract.cause:
        return "every rank has ended with 0: nothing is left to stop or to start"
    if "start" in given and contract.was_interrupted:
        return "after an interruption no process is started"
    if "start" in given:
        return f"{_counted(contract, contract.restarts_s, now_s)}: no further one"
    if "finish" in given and contract.cause < 0:
        number = -contract.cause
        what = "the interruption" if contract.was_interrupted else "the first failure"
        return f"{what} was {signal_name(number)}: the exit code is 128 + {number}"
    if "finish" in given:
        return f"the first failure had code {contract.cause}: it is the exit code"
    return f"all ranks have ended, and none starts again: Finish({code})"


def _counted(contract: LauncherContract, restarts_s: list[float], now_s: float) -> str:
    script = contract.script
    num = sum(at_s > now_s - script.window_s for at_s in restarts_s)
    return (
        f"{num} restart{'s' * (num != 1)} in the last {script.window_s:.4g} s, "
        f"max_restarts is {script.max_restarts}"
    )


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 1 has`, `ranks 0, 2 have`, to go on with a participle or an object."""
    there = sorted(ranks)
    if len(there) == 1:
        return f"rank {there[0]} has"
    return f"ranks {', '.join(map(str, there))} have"
