"""The headline of 4.7: the event, what the supervisor did about it, and what is due.

Only the part that is wrong is told. The rest of the history is in the evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from signal import SIGTERM

from distlab.given.process_group import SIGKILL
from distlab.grading.checks.recovery.contract import Due, SupervisorContract
from distlab.grading.kit.launcher_actions import END, Fact, signal_name
from distlab.terminal import enumerated


def situation(contract: SupervisorContract, event: Fact, now_s: float) -> str:
    """Describe an event by what the contract knows before it happens."""
    if event == ("begin",):
        script = contract.script
        ranks = _count(script.world_size, "rank")
        return f"at Begin, with {ranks} and {_count(script.num_standbys, 'standby')}"
    if event == END:
        return "after the last event"
    is_stopping = contract.stop_code is not None
    if is_stopping and event == ("tick",) and now_s < contract.kill_at_s:
        return "when a Tick came earlier than grace_s after SIGTERM"
    if is_stopping and event[0] == "ended" and contract.alive == {event[1]}:
        return f"when process {event[1]}, the last one, had ended"
    stopping = " while the run was being stopped" * is_stopping
    return f"when {_happened(contract, event)}{stopping}"


def _happened(contract: SupervisorContract, event: Fact) -> str:
    match event:
        case ("ready", process):
            return _of_ready(contract, process)
        case ("ended", process, code):
            return _of_end(contract, process, code)
        case ("frozen", process, generation):
            if generation != contract.generation:
                came = f"came in generation {contract.generation}"
                return f"a Frozen from generation {generation} {came}"
            if process not in contract.alive:
                return f"a Frozen came for process {process}, which had ended"
            return f"process {process} was reported as frozen"
        case ("completed", step, generation):
            if generation != contract.generation:
                came = f"came in generation {contract.generation}"
                return f"a Completed from generation {generation} {came}"
            return f"step {step} was completed"
        case ("interrupted", number):
            return f"the agent got {signal_name(number)}"
    return "a Tick came"


def _of_ready(contract: SupervisorContract, process: int) -> str:
    if process in contract.members.values():
        return f"process {process}, which has a rank, sent another Ready"
    if process not in contract.alive:
        return f"a Ready came from process {process}, which had ended"
    return f"process {process} became ready"


def _of_end(contract: SupervisorContract, process: int, code: int) -> str:
    if process not in contract.alive:
        return f"a second Ended of process {process} came"
    if contract.stop_code is not None:
        return f"process {process} ended with code {code}"
    ranks = [rank for rank, p in contract.members.items() if p == process]
    alive = {p for p in contract.members.values() if p in contract.alive}
    if ranks and contract.is_whole and alive == {process} and not code:
        return f"rank {ranks[0]}, the last one, ended with code 0"
    if ranks:
        return f"rank {ranks[0]}'s process ended with code {code}"
    if process in contract.idle:
        return f"standby process {process} ended with code {code}"
    return f"process {process} ended with code {code} before it was ready"


def no_signal(contract: SupervisorContract) -> str:
    """The headline where a Tick was due, and with it SIGKILL, but did not come."""
    alive = _processes(sorted(contract.alive))
    return (
        f"the supervisor asked for no Tick at {contract.kill_at_s:.3g} s, grace_s "
        f"after SIGTERM, so {alive} never got SIGKILL"
    )


def used(
    contract: SupervisorContract, num_recent: int, num_old: int, *, together: bool
) -> str:
    """How many restarts count, with the limit."""
    script = contract.script
    older = f" and {num_old} before that" * bool(num_old)
    older = older or ", some of them at once" * together
    return (
        f", with {num_recent} of {script.max_restarts} restarts used in the last "
        f"{script.window_s:g} s{older}"
    )


def failed(contract: SupervisorContract) -> str:
    """Which failure without a new step it is, with the limit."""
    num = contract.num_failed
    if not num:
        return ", although no group had failed yet"
    return f", failure {num} of max_failures = {contract.script.max_failures}"


def difference(
    contract: SupervisorContract,
    due: Due,
    part: str,
    actions: Sequence[Fact],
    *,
    gives_up: bool,
) -> str:
    """What was done and what is due, in the part that is wrong."""
    if gives_up:
        return f"the supervisor stopped the run, {_instead(contract, due)}"
    if part in ("starts", "numbers"):
        return _of_starts(contract, due, part, actions)
    if part == "signals":
        return _of_signals(due, actions)
    if part == "finish":
        return _of_finish(contract, due, actions)
    forms = [(a[1], dict(a[2])) for a in actions if a[0] == "form"]
    return _of_forms(contract, due, part, forms)


def _instead(contract: SupervisorContract, due: Due) -> str:
    if due.num_starts or due.form:
        also = f"form generation {due.form}" if due.form else ""
        start = f"start {_new(due.num_starts)}" if due.num_starts else ""
        return f"expected it to {' and '.join(filter(None, (start, also)))}"
    num, n = len(contract.alive), contract.script.world_size
    if num < n:
        return "expected no action"
    return f"but {num} processes are alive, enough for {_count(n, 'rank')}"


def _of_starts(
    contract: SupervisorContract, due: Due, part: str, actions: Sequence[Fact]
) -> str:
    starts = [a[1] for a in actions if a[0] == "start"]
    did = f"the supervisor started {_processes(starts)}"
    if part == "numbers":
        return f"{did}, a number that was used before; expected a new one"
    if due.reason == "frozen":
        return f"{did} before the frozen one had ended, expected SIGKILL only"
    if any(number == SIGTERM for _, number in due.signals):
        return f"{did}, expected it to stop the run"
    if not starts and any(a[0] == "signal" for a in actions):
        wanted = _new(due.num_starts)
        return f"the supervisor {_sent(actions)}, expected it to start {wanted}"
    if due.reason == "some done":
        return f"{did}, expected no new process: a rank that is done needs none"
    if not due.num_starts:
        return f"{did}, expected no new process"
    return f"{did}, expected {_new(due.num_starts)}"


def _of_signals(due: Due, actions: Sequence[Fact]) -> str:
    to: dict[int, list[int]] = {}
    for process, number in sorted(due.signals):
        to.setdefault(number, []).append(process)
    wanted = [f"{signal_name(s)} to {_processes(ps)}" for s, ps in to.items()]
    did = f"the supervisor {_sent(actions)}"
    finish = [a[1] for a in actions if a[0] == "finish"]
    if finish and not any(a[0] == "signal" for a in actions):
        did = f"the supervisor returned Finish({finish[0]})"
    return f"{did}, expected {' and '.join(wanted) or 'no signal'}"


def _sent(actions: Sequence[Fact]) -> str:
    found = []
    numbers = dict.fromkeys(a[2] for a in actions if a[0] == "signal")
    for number in sorted(numbers, key=(SIGTERM, SIGKILL, *numbers).index):
        to = sorted(a[1] for a in actions if a[0] == "signal" and a[2] == number)
        found.append(f"{signal_name(number)} to {_processes(to)}")
    return f"sent {' and '.join(found) or 'no signal'}"


def _of_finish(contract: SupervisorContract, due: Due, actions: Sequence[Fact]) -> str:
    codes = [a[1] for a in actions if a[0] == "finish"]
    if due.finish is None:
        did = f"the supervisor returned Finish({codes[0]})"
        if contract.alive:
            is_one = len(contract.alive) == 1
            alive = _processes(sorted(contract.alive))
            return f"{did} although {alive} {'is' if is_one else 'are'} still alive"
        return f"{did}, expected no Finish"
    why = {
        "interrupted": "128 + the signal that interrupted it",
        "done": "because all members were done",
        "loop": "the first code other than 0 after the newest step",
        "limit": "the first code other than 0 after the newest step",
    }.get(contract.stop_reason, "")
    if due.finish == 1 and contract.stop_reason == "limit":
        why = why * any(contract.failures) or "since no code was other than 0"
    did = f"returned {', '.join(f'Finish({c})' for c in codes)}" if codes else ""
    did = did or "did not finish"
    return f"the supervisor {did}, expected Finish({due.finish}), {why}".rstrip(", ")


def _of_forms(
    contract: SupervisorContract,
    due: Due,
    part: str,
    forms: Sequence[tuple[int, Mapping[int, int]]],
) -> str:
    if not forms:
        why = _can(contract)
        return f"the supervisor formed no group, expected Form({due.form}): {why}"
    if len(forms) > 1:
        return f"the supervisor returned {len(forms)} Forms, expected at most one"
    generation, members = forms[0]
    form = f"Form({generation})"
    if part == "generation":
        formed = f"the supervisor formed generation {generation}"
        return f"{formed}, expected generation {due.form}"
    if part == "survivors":
        return f"{form} {_moved(contract, members)}"
    wrong = of_members(contract, members) if _is_forming(contract) else ""
    if wrong:
        return f"{form} {wrong}"
    if due.form:
        given = ", ".join(map(str, sorted(members))) or "none"
        most = contract.script.world_size - 1
        return f"{form} gave processes to the ranks {given}, expected 0 … {most}"
    if contract.stop_code is not None:
        return f"the supervisor returned {form}, expected no Form"
    return f"the supervisor returned {form}, expected no Form: {_can(contract)}"


def _is_forming(contract: SupervisorContract) -> bool:
    return contract.stop_code is None and not contract.is_whole


def _can(contract: SupervisorContract) -> str:
    """Why a group can be formed, or must not be."""
    if contract.is_whole:
        return "no member has failed"
    num_empty = contract.script.world_size - len(contract.kept())
    ready = _count(len(contract.idle), "process", "processes")
    are = "is" if len(contract.idle) == 1 else "are"
    return f"{ready} {are} ready for {_count(num_empty, 'empty rank')}"


def _moved(contract: SupervisorContract, members: Mapping[int, int]) -> str:
    """What became of the first survivor that did not keep its rank."""
    for rank, process in sorted(contract.kept().items()):
        if members.get(rank) == process:
            continue
        now = [r for r, p in sorted(members.items()) if p == process]
        if now:
            return (
                f"moved process {process} from rank {rank} to rank {now[0]}, "
                f"expected it to keep its rank"
            )
        return f"left out process {process}, expected it to keep rank {rank}"
    return "moved a survivor, expected it to keep its rank"


def of_members(contract: SupervisorContract, members: Mapping[int, int]) -> str:
    """What is wrong with the processes that a Form gives ranks, or nothing."""
    for process, count in Counter(members.values()).items():
        ranks = sorted(r for r, p in members.items() if p == process)
        if count > 1:
            both = " and ".join(map(str, ranks))
            given = f"gave ranks {both} to the same process {process}"
            return f"{given}, expected a different process for each"
        if process not in contract.alive:
            return f"gave rank {ranks[0]} to process {process}, which has ended"
        if process not in contract.idle and process not in contract.members.values():
            return f"gave rank {ranks[0]} to process {process}, which is not ready"
    return ""


def _new(num: int) -> str:
    return _count(num, "new process", "new processes")


def _count(num: int, one: str, many: str = "") -> str:
    return f"{num} {one if num == 1 else many or one + 's'}"


def _processes(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no process"
    return f"process{'es' * (len(numbers) > 1)} {enumerated(numbers)}"
