"""What happened, in words: one sentence for a run, one line for each of its ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from distlab.comm import ANY, Event
from distlab.paths import shown
from distlab.runner.abort import misfit_of
from distlab.runner.record import LINE_LOST, ErrorRecord, RankRecord, Run
from distlab.runner.signals import (
    exit_code_in,
    meaning_of_signal,
    name_of_signal,
    signal_in,
)

_FEW = 4  # ranks that are named one by one
# Where torch's text goes on with what its first half says already.
_REPEATS = re.compile(
    r" \(at least one dimension spans| because the unspecified dimension size"
    r"| \(or directly access saved|\. The gradient must match"
)
_OUR_COMM = re.compile(
    r"'(PointToPointOnly|Journal|ByteMeter|TorchComm)' object|\bWrapper(?=\.\w+\(\))"
)
_TRACEBACK = "Traceback (most recent call last)"
_LONG, _SHORT = 110, 40  # characters of an error's text: cut, and at least kept
NOBODY = -1  # in the place of a rank: a line of evidence that is about none of them
SENDS = ("send", "isend")
RECEIVES = ("recv", "irecv")


@dataclass(frozen=True)
class Evidence:
    """One rank's line in an autopsy: `rank 0  waiting  call #2 send → 1  file:41`.

    With NOBODY for a rank it is about the whole, and is shown without a number.
    """

    rank: int
    state: str
    text: str = ""
    where: str = ""


def explain(run: Run) -> str:
    """One sentence on how `run` ended, naming the rank and the line that matter."""
    if run.outcome == "finished":
        return explain_finish(run)
    if run.outcome == "deadlock":
        return explain_deadlock(run)
    if run.outcome == "timeout":
        return explain_timeout(run)
    return explain_failure(run)


def explain_finish(run: Run) -> str:
    """Who came to the end, and who died as it was declared beforehand."""
    dead = [record for record in run.ranks if record.status == "died"]
    count = _count(run.world_size - len(dead))
    deaths = [f"; rank {r.rank} {explain_end(r)}, as was declared" for r in dead]
    return f"{count} finished in {run.took}" + "".join(deaths)


def explain_deadlock(run: Run) -> str:
    """Who waits for whom, and why no rank can go on."""
    waiting = [r for r in run.ranks if r.status == "waiting" and r.waiting]
    ops = {r.waiting["op"] for r in waiting if r.waiting and r.rank in run.cycle}
    if run.cycle:
        if len(run.cycle) == 2:
            who, next_one, none = _names(run.cycle), "other", "neither"
        else:
            circle = "→".join(_shortened([*run.cycle, run.cycle[0]]))
            who, next_one, none = f"ranks {circle}", "next", "none"
        if ops <= set(SENDS):
            return f"{who} wait in send, each for the {next_one}; {none} is in recv"
        if ops <= set(RECEIVES):
            return f"{who} wait in recv, each for the {next_one}; {none} is in send"
        return f"{who} wait, each for the {next_one}"
    for record in waiting:
        for peer in run.waits_for.get(record.rank, ()):
            if _index(run, peer) and run.ranks[peer].status == "finished":
                return (
                    f"rank {record.rank} waits in {in_words(record.waiting)}, "
                    f"but rank {peer} has already finished"
                )
    asking = [r for r in waiting if r.waiting and r.waiting.get("service")]
    if asking:
        return "; ".join(map(_not_yet, asking[:_FEW])) + ", and no rank sends any more"
    first = waiting[0]
    return (
        f"rank {first.rank} waits in {in_words(first.waiting)}, which no rank answers"
    )


def _not_yet(record: RankRecord) -> str:
    call = record.waiting or {}
    at = place_of(call).rpartition(os.sep)[2]
    return (
        f"rank {record.rank} waits in {in_words(call)}{' at ' * bool(at)}{at}, which "
        'has answered "not yet"'
    )


def explain_timeout(run: Run) -> str:
    """Which rank was still busy when the time was up, and where."""
    idle = f"no rank did anything for {run.idle_s:.1f} s: " if run.idle_s else ""
    stopped = [r.rank for r in run.ranks if r.stopped]
    if stopped:
        were = "was" if len(stopped) == 1 else "were"
        return f"{idle}{_names(stopped)} {were} stopped by a signal and never went on"
    busy = [r for r in run.ranks if r.status == "running"]
    named = busy or [r for r in run.ranks if r.status == "waiting"]
    if not named:  # the last of them ended just as the time was up
        return f"the run had not come to its end after {run.limit_s:g} s"
    at = _spot(own_frame(named[0].stack))
    who = _names(r.rank for r in named)
    limit = f" after {run.limit_s:g} s" if not run.idle_s else ""
    return f"{idle}{who} had not finished{limit}" + (
        f"; rank {named[0].rank} was at {at}" if at else ""
    )


def explain_failure(run: Run) -> str:
    """The first failure; the others that failed because of it come second."""
    first = run.primary()
    service = _failed_service(run, first)
    if service:
        return service
    if first is None:
        return "the run failed without a record"
    same = [r.rank for r in run.ranks if _signature(r) == _signature(first)]
    who = f"{_names(same)} each" if len(same) > 1 else _names(same)
    if len(same) == run.world_size > 1:
        who = "every rank"
    head = f"{who} {explain_end(first)}"
    if ended_by_transport(first):
        misfit = misfit_of(run, first)
        head += f"; {misfit}" if misfit else ""
    return head + _left_waiting(run, same)


def _failed_service(run: Run, first: RankRecord | None) -> str:
    """What became of the service that failed before any rank did, if one did."""
    for name, record in run.services.items():
        if record.failed_s is None:
            continue
        follows = first is not None and first.error and first.error.peer_lost
        if first is None or follows or record.failed_s < (first.failed_s or 0.0):
            return f'the service "{name}" {explain_end(record)}'
    return ""


def _left_waiting(run: Run, failed: Collection[int]) -> str:
    """Who waited when ranks had failed: for these, or for others, as far as known."""
    waiting = [r.rank for r in run.ranks if r.status == "waiting"]
    left = {rank: run.waits_for.get(rank, ()) for rank in waiting}
    for_it = [r for r, peers in left.items() if not peers or set(peers) & set(failed)]
    rest = [rank for rank in left if rank not in for_it]
    if rest:  # the evidence has who waited for whom
        were = "was" if len(left) == 1 else "were"
        return f"; {_names(list(left))} {were} left waiting"
    it = "it" if len(failed) == 1 else "them"
    return f"; {_names(for_it)} waited for {it}" if for_it else ""


def explain_end(record: RankRecord) -> str:
    """How one rank failed: what it raised and where, or how its process ended."""
    if record.error is not None:
        at = _spot(own_frame(record.error.frames))
        return f"raised {error_text(record.error, at)}"
    status = record.exit_status
    if status is None:
        return "ended without a result"
    if ended_by_transport(record):
        return (
            "was ended by the transport (SIGABRT): it received more bytes than "
            "its tensor holds"
        )
    if number := signal_in(status):
        return _killed(number, _spot(own_frame(record.stack)))
    code = exit_code_in(status)
    if code == LINE_LOST:
        return "closed or replaced a file descriptor of distlab's, and was not heard of"
    return f"exited with status {code} before it had finished"


def _killed(number: int, at: str) -> str:
    means = meaning_of_signal(number)
    text = f"was killed by {name_of_signal(number)}" + (f" at {at}" if at else "")
    return text + (f" ({means})" if means else "")


def ended_by_transport(record: RankRecord) -> bool:
    """Whether gloo ended this rank: more bytes came than its tensor holds."""
    status = record.exit_status
    return (
        signal_in(status or 0) == signal.SIGABRT
        and "gloo::" in record.output
        # It ends a process for other reasons too, such as a lost descriptor.
        and ("enforce fail" not in record.output or "nbytes" in record.output)
    )


def evidence(run: Run) -> tuple[Evidence, ...]:
    """One line per rank on where it is."""
    return tuple(_line(record) for record in run.ranks)


def describe(
    call: Event | None, signs: tuple[str, str, str, str] = ("→", "←", "", " ")
) -> str:
    """`send → 1`, `recv ← any rank`, `all_reduce`.

    `signs` stand before a destination, a source and a rank's number, and between both.
    """
    if call is None:
        return "a call"
    if call.get("service"):
        name = call["service"]
        return "call to " + (name if name[:5] == "rank " else f'the service "{name}"')
    to, source, rank, joint = signs
    peers = []
    if call.get("dst") is not None:
        peers.append(f"{to} {rank}{'?' if call['dst'] < 0 else call['dst']}")
    if call.get("src") is not None:
        number = f"{rank}{'?' if call['src'] < ANY else call['src']}"
        peers.append(f"{source} {'any rank' if call['src'] == ANY else number}")
    tag = f" (tag {call['tag']})" if call.get("tag") else ""
    return f"{call['op']} {joint.join(peers)}".rstrip() + tag


def in_words(call: Event | None) -> str:
    """As `describe`, for a sentence: `send to rank 1`, `recv from any rank`."""
    return describe(call, ("to", "from", "rank ", " and "))


def describe_tensor(call: Event | None) -> str:
    """`[8] float32` for the tensor of a call, or nothing."""
    if call is None:
        return ""
    shape, dtype = call.get("shape"), call.get("dtype")
    if shape is None:
        shape, dtype = call.get("into_shape"), call.get("into_dtype")
    return "" if shape is None else f"{shape} {dtype}"


def error_text(error: ErrorRecord, at: str = "") -> str:
    """`KeyError at ring.py:7: 'x'`, on one line and not endless."""
    lines = error.message.strip().splitlines()
    # If it has another rank's traceback, what that rank raised stands last.
    text = lines[-1] if any(_TRACEBACK in line for line in lines) else error.message
    message = _OUR_COMM.sub("comm", " ".join(text.split()))
    message = without_repeats(message).rstrip(".")
    kind = error.type
    if "DefaultCPUAllocator" in message:
        kind = "out of memory"
        message = message[message.index("you tried") :].replace("Error code 12 ", "")
    elif len(message) > _LONG:
        end = message.find(". ", _SHORT, 160)  # of the first sentence
        message = message[:end] if end > 0 else message[:157] + "..."
    where = f"{kind} at {at}" if at else kind
    return f"{where}: {message}" if message != error.type else where


def without_repeats(text: str) -> str:
    """An error's text up to where torch only says the same again."""
    return _REPEATS.split(text)[0]


def own_frame(frames: tuple[tuple[str, int], ...]) -> tuple[str, int] | None:
    """The innermost frame outside distlab, torch and the standard library.

    A task that is not written yet is filled by the reference: then its caller counts.
    """
    distlab = str(Path(__file__).parents[1])
    own = [
        (file, line)
        for file, line in reversed(frames)
        if "site-packages" not in file
        and not file.startswith((distlab, "<"))
        and f"{os.sep}lib{os.sep}python" not in file
    ]
    theirs = [at for at in own if f"{os.sep}solutions{os.sep}" not in at[0]]
    return next(iter(theirs or own), None)


def place(frame: tuple[str, int] | None) -> str:
    """`template_collectives.py:41`, as one would type it from here."""
    return f"{shown(frame[0])}:{frame[1]}" if frame and frame[0] else ""


def place_of(call: Event) -> str:
    """Where a call stands; with the line that called its function, if there is one.

    In another file stands a part that is not under judgement: its caller counts.
    """
    where = place((call["file"], call["line"]))
    if not call.get("via"):
        return where
    file, line = call["via"]
    return f"{where} ← :{line}" if file == call["file"] else place((file, line))


def _spot(frame: tuple[str, int] | None) -> str:
    """`template_collectives.py:41`, for a sentence: the evidence has the folder."""
    return place(frame).rpartition(os.sep)[2]


def _line(record: RankRecord) -> Evidence:
    if record.status == "waiting" and record.waiting:
        call = record.waiting
        text = f"call #{call['n']} {describe(call)}  {describe_tensor(call)}"
        text += _waited_for(record, call)
        if call.get("service"):
            text = f"{describe(call)}: not yet"
        state = "stopped" if record.stopped else "waiting"
        where = place_of(call)
        return Evidence(rank=record.rank, state=state, text=text, where=where)
    if record.error is not None:
        return _line_of_error(record, record.error)
    if record.status == "died":
        return _line_of_death(record)
    if record.status == "running":
        where = place(own_frame(record.stack))
        state = "stopped" if record.stopped else "busy"
        return Evidence(rank=record.rank, state=state, where=where)
    return Evidence(rank=record.rank, state="finished")


def _waited_for(record: RankRecord, call: Event) -> str:
    """`, wait() in line 63` of a posted call that is waited for on another line."""
    for event in reversed(record.journal):
        if event["k"] == "wait" and event["n"] == call["n"]:
            same_file = event["file"] == call["file"]
            if same_file and event["line"] != call["line"]:
                return f", wait() in line {event['line']}"
            return ""
    return ""


def _line_of_error(record: RankRecord, error: ErrorRecord) -> Evidence:
    where = place(own_frame(error.frames))
    if error.type == "PeerLost":
        text = "its peer was gone: a consequence, not the cause"
        return Evidence(rank=record.rank, state="cut off", text=text, where=where)
    state = "refused" if error.refused else record.status
    text = error.message if error.refused else error_text(error)
    return Evidence(rank=record.rank, state=state, text=text, where=where)


def _line_of_death(record: RankRecord) -> Evidence:
    """The call that a rank had begun and not ended when its process did."""
    begun = record.open_calls()
    if not begun:
        where = place(own_frame(record.stack))
        text = explain_end(replace(record, stack=()))
        return Evidence(rank=record.rank, state="died", text=text, where=where)
    call = begun[-1]
    text = f"call #{call['n']} {describe(call)}  {describe_tensor(call)}"
    return Evidence(rank=record.rank, state="died", text=text, where=place_of(call))


def _signature(record: RankRecord) -> tuple[object, ...]:
    error = record.error
    kind = (error.type, own_frame(error.frames)) if error else ()
    return (record.status, kind, record.exit_status)


def _names(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > _FEW and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    if len(numbers) > 2 * _FEW:
        return f"{len(numbers)} ranks, the first is rank {numbers[0]},"
    return "ranks " + ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _shortened(numbers: list[int]) -> list[str]:
    """The numbers; of very many the first and the last ones."""
    texts = [str(number) for number in numbers]
    if len(texts) <= 3 * _FEW:
        return texts
    return [*texts[:_FEW], "…", *texts[-2:]]


def _count(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _index(run: Run, rank: int) -> bool:
    return 0 <= rank < run.world_size
