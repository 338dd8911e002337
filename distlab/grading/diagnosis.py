"""From how a run ended to the misconception behind it, where one can be named."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from distlab.comm import ANY, COLLECTIVES, Event
from distlab.curriculum import UnitSource
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import describe_tensor, evidence, explain

RULES = {
    "ring-of-sends": (
        "one side of every blocking pair must receive: use sendrecv, or isend "
        "before recv"
    ),
    "nobody-receives": "every rank runs the same line: branch on comm.rank",
    "nobody-sends": "every recv needs a send on the other side: branch on comm.rank",
    "peer-finished": "every send needs its recv, on exactly the rank it names",
    "send-to-self": "a rank does not send to itself: leave your own rank out",
    "no-such-rank": "ranks are 0 … n - 1; the one after the last is 0: use % n",
    "collective-not-here": "send and recv only: this unit builds the rest",
    "mismatched-buffers": "both sides of a message need the same shape and dtype",
    "collective-mismatch": "every rank calls the same collectives in the same order",
    "spinning": "look for a loop whose end never comes",
    "out-of-memory": "look at the size of the tensor you make on that line",
    "rank-died": "a rank must return from its function, not end its process",
}


def diagnose(run: Run, source: UnitSource) -> NotYetError:
    """The verdict on a run that did not finish."""
    mismatch = _mismatched(run)
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


def diagnose_buffers(run: Run) -> None:
    """Look at a finished run for messages whose two ends did not fit.

    The transport may complete them all the same and deliver rubbish.

    Raises:
        NotYetError: there is one.
    """
    mismatch = _mismatched(run)
    if mismatch:
        raise mismatch


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
    if any(call["op"] in COLLECTIVES for call in waiting):
        return _stuck_collective(run)
    if ops <= {"send", "isend"} and run.cycle:
        return _not_yet(run, "ring-of-sends", kind="DEADLOCK")
    if _never(run, "recv") and ops <= {"send", "isend"}:
        message = f"{_all(run)} called send; nobody called recv"
        if not all(r.waiting for r in run.ranks):
            message = f"{explain(run)}: nobody called recv"
        return _not_yet(run, "nobody-receives", message, kind="DEADLOCK")
    if _never(run, "send") and ops <= {"recv", "irecv"}:
        message = f"{_all(run)} called recv; nobody called send"
        if not all(r.waiting for r in run.ranks):
            message = f"{explain(run)}: nobody called send"
        return _not_yet(run, "nobody-sends", message, kind="DEADLOCK")
    if any(r.status == "finished" for r in run.ranks):
        return _not_yet(run, "peer-finished", kind="DEADLOCK")
    return _not_yet(run, "", kind="DEADLOCK")


def _stuck_collective(run: Run) -> NotYetError:
    finished = [r for r in run.ranks if r.status == "finished"]
    if finished:
        return _not_yet(run, "peer-finished", kind="DEADLOCK")
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
        others = [r.waiting for r in run.ranks if r.waiting]
        sending = "sends to" in text and all(c["op"] == "send" for c in others)
        if sending and others and _never(run, "recv"):
            message = (
                f"{_all(run)} called send to rank {first.rank}; nobody called recv"
            )
            return _not_yet(run, "nobody-receives", message)
        receiving = "receives from" in text and all(c["op"] == "recv" for c in others)
        if receiving and others and _never(run, "send"):
            message = (
                f"{_all(run)} called recv from rank {first.rank}; nobody called send"
            )
            return _not_yet(run, "nobody-sends", message)
        return _not_yet(run, "send-to-self", text)
    return _not_yet(run, "raised", text)


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
