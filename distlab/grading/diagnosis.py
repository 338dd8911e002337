"""From how a run ended to the misconception behind it, where one can be named."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from distlab.comm import ANY, COLLECTIVES, Event
from distlab.curriculum import UnitSource
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import (
    Evidence,
    describe,
    describe_tensor,
    evidence,
    explain,
    place,
)

RULES = {
    "ring-of-sends": (
        "one side of every pair must receive: sendrecv, or isend before recv"
    ),
    "ring-of-recvs": (
        "one side of every blocking pair must send: use sendrecv, or irecv before send"
    ),
    "nobody-receives": "every rank runs the same line: branch on comm.rank",
    "nobody-sends": "every recv needs a send on the other side: branch on comm.rank",
    "peer-finished": "every send needs its recv, on exactly the rank it names",
    "send-to-self": "a rank does not send to itself: leave your own rank out",
    "no-such-rank": "ranks are 0 … n - 1; the one after the last is 0: use % n",
    "collective-not-here": "send and recv only: this unit builds the rest",
    "mismatched-buffers": "both sides of a message need the same shape and dtype",
    "never-waited": "keep what isend, irecv and async_op return, and call its wait()",
    "collective-mismatch": "every rank calls the same collectives in the same order",
    "spinning": "look for a loop whose end never comes",
    "out-of-memory": "look at the size of the tensor you make on that line",
    "rank-died": "a rank must return from its function, not end its process",
}


def diagnose(run: Run, source: UnitSource) -> NotYetError:
    """The verdict on a run that did not finish."""
    mismatch = _mismatched(run) or _unlike_collectives(run)
    if mismatch:
        return mismatch
    if run.outcome == "deadlock":
        return _deadlock(run)
    if run.outcome == "timeout":
        return _not_yet(run, "spinning", kind="TIME")
    first = run.primary()
    if run.outcome == "died" or first is None or first.error is None:
        return _not_yet(run, "rank-died")
    if first.error.refused:
        return _refused(run, first)
    if "DefaultCPUAllocator" in first.error.message or first.error.type == (
        "MemoryError"
    ):
        return _not_yet(run, "out-of-memory", kind="MEMORY")
    return _not_yet(run, "raised")


def diagnose_finished(run: Run) -> None:
    """Look at a finished run for calls that went wrong without an error.

    The transport may deliver rubbish where the two ends of a message, or the ranks'
    parts in a collective, do not fit; and a transfer that nobody waited for may have
    come in time by luck.

    Raises:
        NotYetError: there is one.
    """
    wrong = _mismatched(run) or _unlike_collectives(run) or _never_waited(run)
    if wrong:
        raise wrong


def _not_yet(
    run: Run, slug: str, message: str = "", *, kind: str = "NOT YET"
) -> NotYetError:
    return NotYetError(
        message or explain(run),
        slug=slug,
        rule=RULES.get(slug, ""),
        evidence=evidence(run),
        kind=kind,
        fatal=True,
        output=printed(run),
    )


def printed(run: Run) -> str:
    """What the ranks printed, each line with its rank."""
    return "\n".join(
        f"[rank {record.rank}] {line}"
        for record in run.ranks
        for line in record.output.splitlines()
    )


def _deadlock(run: Run) -> NotYetError:
    waiting = [r.waiting for r in run.ranks if r.waiting]
    ops = {call["op"] for call in waiting}
    if ops & COLLECTIVES:
        return _stuck_collective(run)
    under_way = {call["op"] for rank in run.cycle for call in _open(run.ranks[rank])}
    if under_way and under_way <= {"send", "isend"}:
        return _not_yet(run, "ring-of-sends", kind="DEADLOCK")
    if under_way and under_way <= {"recv", "irecv"}:
        return _not_yet(run, "ring-of-recvs", kind="DEADLOCK")
    if _never(run, "recv") and ops <= {"send", "isend"}:
        return _one_sided(run, "nobody-receives", "send", "recv")
    if _never(run, "send") and ops <= {"recv", "irecv"}:
        return _one_sided(run, "nobody-sends", "recv", "send")
    if any(r.status == "finished" for r in run.ranks):
        return _not_yet(run, "peer-finished", kind="DEADLOCK")
    return _not_yet(run, "", _crossed(run), kind="DEADLOCK")


def _crossed(run: Run) -> str:
    """A rank that waits for one whose own messages under way go elsewhere, in words."""
    for record in run.ranks:
        call = record.waiting
        if call is None or call["op"] not in ("recv", "irecv"):
            continue
        peer = call["src"]
        aims = [c["dst"] for c in _open(run.ranks[peer]) if c["dst"] is not None]
        if aims and record.rank not in aims:
            return (
                f"rank {record.rank} waits in {describe(call)}, "
                f"but rank {peer} sends to rank {aims[0]}"
            )
    return ""


def _open(record: RankRecord) -> list[Event]:
    """The calls of a rank that have started and not ended."""
    ended = {e["n"] for e in record.journal if e["k"] in ("exit", "error")}
    return [call for call in record.calls() if call["n"] not in ended]


def _one_sided(run: Run, slug: str, called: str, missing: str) -> NotYetError:
    message = f"{_all(run)} called {called}; nobody called {missing}"
    if not all(r.waiting for r in run.ranks):
        message = f"{explain(run)}: nobody called {missing}"
    return _not_yet(run, slug, message, kind="DEADLOCK")


def _stuck_collective(run: Run) -> NotYetError:
    finished = [r for r in run.ranks if r.status == "finished"]
    if finished:
        return _not_yet(run, "collective-mismatch", kind="DEADLOCK")
    lines = {
        r.rank: f"{r.waiting['op']} (call #{r.waiting['n']})"
        for r in run.ranks
        if r.waiting
    }
    who = ", ".join(f"rank {rank} in {what}" for rank, what in lines.items())
    message = f"the ranks wait in different calls: {who}"
    return _not_yet(run, "collective-mismatch", message, kind="DEADLOCK")


def _refused(run: Run, first: RankRecord) -> NotYetError:
    assert first.error is not None
    text = first.error.message
    if "not available here" in text:
        return _not_yet(run, "collective-not-here", text)
    if "there is only" in text:
        return _not_yet(run, "no-such-rank", text)
    if "that is itself" in text:
        return _itself(run, first, text)
    return _not_yet(run, "raised", text)


def _itself(run: Run, first: RankRecord, text: str) -> NotYetError:
    """A rank named itself: alone, or because all ranks run a line without a branch."""
    others = [r.waiting for r in run.ranks if r.waiting]
    for slug, called, missing, end in (
        ("nobody-receives", "send", "recv", "dst"),
        ("nobody-sends", "recv", "send", "src"),
    ):
        same = all(c["op"] == called and c[end] == first.rank for c in others)
        if others and same and _last_op(first) == called and _never(run, missing):
            where = "to" if called == "send" else "from"
            message = (
                f"{_all(run)} called {called} {where} rank {first.rank}; "
                f"nobody called {missing}"
            )
            return _not_yet(run, slug, message)
    return _not_yet(run, "send-to-self", text)


def _last_op(record: RankRecord) -> str:
    calls = record.calls()
    return str(calls[-1]["op"]) if calls else ""


def _never(run: Run, half: str) -> bool:
    """Whether no rank ever began the given half of a message."""
    ops = {half, f"i{half}", "sendrecv"}
    return all(call["op"] not in ops for r in run.ranks for call in r.calls())


def _all(run: Run) -> str:
    return "both ranks" if run.world_size == 2 else f"all {run.world_size} ranks"


def _mismatched(run: Run) -> NotYetError | None:
    for (src, dst, _tag), sent, received in _pairs(run):
        sent_facts = (_numel(sent["shape"]), sent["dtype"])
        received_facts = (_numel(received["into_shape"]), received["into_dtype"])
        if sent_facts != received_facts:
            takes = {"shape": received["into_shape"], "dtype": received["into_dtype"]}
            message = (
                f"rank {src} sends {describe_tensor(sent)}, but rank {dst} "
                f"receives into {describe_tensor(takes)}"
            )
            return _not_yet(run, "mismatched-buffers", message)
    return None


def _unlike_collectives(run: Run) -> NotYetError | None:
    """The first collective in which two ranks do not take part alike.

    The k-th calls of a group's members belong together, whatever they are.
    """
    groups: dict[str, dict[int, list[Event]]] = defaultdict(dict)
    for record in run.ranks:
        for call in record.calls():
            if call["op"] in COLLECTIVES:
                groups[call["group"]].setdefault(record.rank, []).append(call)
    for members in groups.values():
        for index in range(max(map(len, members.values()))):
            calls = [(r, own[index]) for r, own in members.items() if index < len(own)]
            (first, one), *rest = calls
            for rank, other in rest:
                if _act(one) != _act(other):
                    message = (
                        f"collective #{index + 1}: rank {first} calls {_act_text(one)}, "
                        f"rank {rank} calls {_act_text(other)}"
                    )
                    return _not_yet(run, "collective-mismatch", message)
    return None


def _act(call: Event) -> tuple[Any, ...]:
    return call["op"], call["root"], _numel(call["shape"]), call["dtype"]


def _act_text(call: Event) -> str:
    root = "" if call["root"] is None else f" with rank {call['root']}"
    of = describe_tensor(call)
    return f"{call['op']}{root}" + (f" on {of}" if of else "")


def _never_waited(run: Run) -> NotYetError | None:
    """A transfer that was started and whose end nobody waited for."""
    lines = [
        Evidence(
            rank=record.rank,
            state="under way",
            text=f"call #{call['n']} {describe(call)}",
            where=place((call["file"], call["line"])),
        )
        for record in run.ranks
        for call in _open(record)
    ]
    if not lines:
        return None
    return NotYetError(
        f"rank {lines[0].rank} started {lines[0].text.partition(' ')[2]} "
        "and never waited for it",
        slug="never-waited",
        evidence=tuple({line.rank: line for line in reversed(lines)}.values())[::-1],
        rule=RULES["never-waited"],
        fatal=True,
        output=printed(run),
    )


def _pairs(run: Run) -> list[tuple[tuple[int, int, int], Event, Event]]:
    """Sends and receives that met, matched channel by channel in order."""
    sends: dict[Any, deque[Event]] = defaultdict(deque)
    receives: dict[Any, deque[Event]] = defaultdict(deque)
    for record in run.ranks:
        sources = {e["n"]: e["src"] for e in record.journal if "src" in e}
        for call in record.calls():
            if call["op"] in ("send", "isend", "sendrecv"):
                sends[record.rank, call["dst"], call["tag"]].append(call)
            if call["op"] in ("recv", "irecv", "sendrecv"):
                src = call["src"]
                src = sources.get(call["n"], ANY) if src == ANY else src
                receives[src, record.rank, call["tag"]].append(call)
    return [
        (channel, sent, received)
        for channel, queue in sends.items()
        for sent, received in zip(queue, receives[channel], strict=False)
    ]


def _numel(shape: list[int] | None) -> int:
    count = 1
    for size in shape or []:
        count *= size
    return count
