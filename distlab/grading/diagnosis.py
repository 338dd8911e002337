"""From how a run ended to the misconception behind it, where one can be named."""

from __future__ import annotations

from distlab.comm import COLLECTIVES, Event
from distlab.grading.mismatches import (
    RULE_RING,
    mismatched_ends,
    never_waited,
    not_yet,
    unlike_collectives,
    unlike_counts,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import ErrorRecord, RankRecord, Run
from distlab.runner.autopsy import SENDS, explain, in_words
from distlab.runner.pairs import pairs
from distlab.runner.record import LINE_LOST
from distlab.runner.signals import exit_code_in, signal_in

_ENDS = ("dst", "src")


def diagnose(run: Run) -> NotYetError:
    """The verdict on a run that did not finish."""
    mismatch = mismatched_ends(run) or unlike_collectives(run)
    if mismatch:
        return mismatch
    if run.outcome == "deadlock":
        return _deadlock(run)
    if run.outcome == "timeout":
        stopped = any(record.stopped for record in run.ranks)
        return not_yet(run, "" if stopped else "spinning", kind="TIME")
    first = run.primary()
    if run.outcome == "died" or first is None or first.error is None:
        return _died(run, first)
    if first.error.refused:
        return _refused(run, first)
    if "DefaultCPUAllocator" in first.error.message or first.error.type == (
        "MemoryError"
    ):
        return not_yet(run, "out-of-memory", kind="MEMORY")
    return not_yet(run, "raised").but(rule=_rule_for(first.error))


def _died(run: Run, first: RankRecord | None) -> NotYetError:
    """A rank's process ended: by its own call of exit, or otherwise."""
    status = first.exit_status if first else None
    verdict = not_yet(run, "rank-died")
    if status is None or signal_in(status):
        return verdict.but(rule="")
    return verdict.but(rule="") if exit_code_in(status) == LINE_LOST else verdict


def _rule_for(error: ErrorRecord) -> str:
    """What an error of Python or torch means here, where that is sure."""
    if error.type in ("EOFError", "BdbQuit"):
        return "ranks have no keyboard: use print, it is shown here"
    if "a leaf Variable" in error.message:
        return "p is the weight, p.grad its gradient: p is not to be changed"
    if "NoneType" in error.message and not _in_a_service(error):
        return (
            "something is None: calls on comm return nothing, and .grad is None until "
            "something has set it"
        )
    return ""


def _in_a_service(error: ErrorRecord) -> bool:
    """Whether it comes from an object that a rank plays: that has no comm."""
    return any(file.endswith("grading/kit/services.py") for file, _ in error.frames)


def diagnose_finished(run: Run) -> None:
    """Look at a finished run for calls that went wrong without an error.

    The transport may deliver rubbish where the two ends of a message, or the ranks'
    parts in a collective, do not fit; and a transfer that nobody waited for may have
    come in time by luck.

    Raises:
        NotYetError: there is one.
    """
    looks = (unlike_counts, mismatched_ends, unlike_collectives, never_waited)
    wrong = next(filter(None, (look(run) for look in looks)), None)
    if wrong:
        raise wrong


def only_messages(run: Run) -> None:
    """Look at a finished run for collectives where these are what is to be built.

    `comm` refuses them; who got at one all the same went behind it.

    Raises:
        NotYetError: there is one.
    """
    for record in run.ranks:
        for call in record.calls():
            if call["op"] in COLLECTIVES:
                message = f"rank {record.rank} calls {in_words(call)}, which comm lacks"
                raise not_yet(run, "collective-not-here", message)


def _deadlock(run: Run) -> NotYetError:
    waiting = [r.waiting for r in run.ranks if r.waiting]
    ops = {call["op"] for call in waiting}
    if ops & COLLECTIVES:
        return _stuck_collective(run)
    under_way = _under_way(run)
    if under_way and under_way <= {"send", "isend"}:
        verdict = not_yet(run, "ring-of-sends", kind="DEADLOCK")
        if "isend" in ops:
            rule = "wait() for the isend last: isend, then recv, then wait()"
            return verdict.but(rule=rule)
        return verdict
    if under_way and under_way <= {"recv", "irecv"}:
        return not_yet(run, "ring-of-recvs", kind="DEADLOCK")
    if _same_peer_round(run):
        return not_yet(run, "sendrecv-with-one-peer", kind="DEADLOCK")
    if _never(run, "recv") and ops <= {"send", "isend"}:
        return _one_sided(run, "unmatched-send", "send", "recv")
    if _never(run, "send") and ops <= {"recv", "irecv"}:
        return _one_sided(run, "unmatched-recv", "recv", "send")
    if any(r.status == "finished" for r in run.ranks):
        verdict = not_yet(run, "peer-finished", kind="DEADLOCK")
        return verdict.but(rule=_own_collective(run) or verdict.rule)
    return not_yet(run, "", _crossed(run), kind="DEADLOCK")


def _under_way(run: Run) -> set[str]:
    """What the ranks of the circle have started, and no other rank has answered.

    Answered receives count too, unless each rank waits where it started the send: a
    rank that waits elsewhere may wait for another message than it means.
    """
    circle = [run.ranks[rank] for rank in run.cycle]
    met: set[int] = set()
    if all(map(_waits_at_once, circle)):
        met = {id(call) for pair in pairs(run.ranks) for call in pair[-2:]}
    return {c["op"] for r in circle for c in r.open_calls() if id(c) not in met}


def _waits_at_once(record: RankRecord) -> bool:
    """Whether the wait stands in the line of the call, or in the next one."""
    call = record.waiting or {}
    waits = [e for e in record.journal if e["k"] == "wait" and e["n"] == call.get("n")]
    return all(e["line"] - call["line"] in (0, 1) for e in waits[-1:])


def _same_peer_round(run: Run) -> bool:
    """A circle of ranks, each of which gives to and takes from the next one at once."""
    calls = [run.ranks[rank].waiting for rank in run.cycle]
    return len(calls) > 2 and all(
        call and call["op"] == "sendrecv" and call["src"] == call["dst"]
        for call in calls
    )


def _own_collective(run: Run) -> str:
    """A function of the learner's that some ranks call and others, done, never did."""
    done = [r for r in run.ranks if r.status == "finished"]
    for record in run.ranks:
        via = record.waiting and record.waiting.get("via")
        if via and all(c.get("via") != via for r in done for c in r.calls()):
            return (
                f"line {via[1]} ran on rank {record.rank}, not on rank {done[0].rank}: "
                "all ranks must call it"
            )
    return ""


def _crossed(run: Run) -> str:
    """A rank that waits for one whose own messages under way go elsewhere, in words."""
    for record in run.ranks:
        call = record.waiting
        if call is None or call["op"] not in ("recv", "irecv"):
            continue
        peer = call["src"]
        if not 0 <= peer < run.world_size:  # it takes from any rank
            continue
        waits = f"rank {record.rank} waits in {in_words(call)}"
        sends = [c for c in run.ranks[peer].open_calls() if c["dst"] is not None]
        for_me = [c["tag"] for c in sends if c["dst"] == record.rank]
        stuck = run.ranks[peer].waiting
        if not for_me and stuck and stuck["op"] in SENDS:  # else it waits for others
            return f"{waits}, but rank {peer} sends to rank {stuck['dst']}"
        if sends and not for_me and call["op"] == "irecv":
            return f"{waits}, but rank {peer} sends to rank {sends[0]['dst']}"
        if for_me and call["tag"] not in for_me:
            told = f"{waits}, but rank {peer} sends with tag {for_me[0]}"
            held = stuck is not None and stuck["op"] in SENDS
            return told + ", and waits until that is taken" * held
    return ""


def _one_sided(run: Run, slug: str, called: str, missing: str) -> NotYetError:
    message = f"{_all(run)} called {called}; no rank called {missing}"
    if not all(r.waiting for r in run.ranks):
        message = f"{explain(run)}: no rank called {missing}"
    verdict = not_yet(run, slug, message, kind="DEADLOCK")
    silent = [r.rank for r in run.ranks if not r.calls()]
    if silent:
        return verdict.but(rule=f"rank {silent[0]} made no call: it lacks a {missing}")
    return verdict


def _stuck_collective(run: Run) -> NotYetError:
    finished = [r for r in run.ranks if r.status == "finished"]
    if finished:
        return not_yet(run, "collective-mismatch", kind="DEADLOCK")
    lines = {
        r.rank: f"{r.waiting['op']} (call #{r.waiting['n']})"
        for r in run.ranks
        if r.waiting
    }
    who = ", ".join(f"rank {rank} in {what}" for rank, what in lines.items())
    message = f"the ranks wait in different calls: {who}"
    return not_yet(run, "collective-mismatch", message, kind="DEADLOCK")


def _refused(run: Run, first: RankRecord) -> NotYetError:
    assert first.error is not None
    text = first.error.message
    if first.error.refused == "itself":
        return _itself(run, first, text)
    slugs = {"collective": "collective-not-here", "no such rank": "no-such-rank"}
    verdict = not_yet(run, slugs.get(first.error.refused, "raised"), text)
    return verdict.but(rule=RULE_RING) if _next_after_last(run, first) else verdict


def _next_after_last(run: Run, first: RankRecord) -> bool:
    """Whether all ranks call their neighbor alike, and the last one's is not there."""
    calls = {r.rank: r.calls()[-1] for r in run.ranks if r.calls()}
    call = calls.get(first.rank, {})
    ends = {call.get("dst"), call.get("src")} - {None}
    if call.get("op") == "sendrecv" and len(ends) == 1:
        return False  # a partner, not a neighbor
    alike = {_offsets(rank, other) for rank, other in calls.items()}
    return len(calls) > 1 == len(alike) and bool(ends & {-1, run.world_size})


def _offsets(rank: int, call: Event) -> tuple[int | None, ...]:
    """How far the ranks of a call are from the one that makes it."""
    return tuple(None if call[end] is None else call[end] - rank for end in _ENDS)


def _itself(run: Run, first: RankRecord, text: str) -> NotYetError:
    """A rank named itself: alone, or because all ranks run a line without a branch."""
    others = [r.waiting for r in run.ranks if r.waiting]
    for slug, called, missing, end in (
        ("unmatched-send", "send", "recv", "dst"),
        ("unmatched-recv", "recv", "send", "src"),
    ):
        same = all(c["op"] == called and c[end] == first.rank for c in others)
        if others and same and _last_op(first) == called and _never(run, missing):
            where = "to" if called == "send" else "from"
            message = (
                f"{_all(run)} called {called} {where} rank {first.rank}; "
                f"no rank called {missing}"
            )
            return not_yet(run, slug, message)
    return not_yet(run, "send-to-self", text)


def _last_op(record: RankRecord) -> str:
    calls = record.calls()
    return str(calls[-1]["op"]) if calls else ""


def _never(run: Run, half: str) -> bool:
    """Whether no rank ever began the given half of a message."""
    ops = {half, f"i{half}", "sendrecv"}
    return all(call["op"] not in ops for r in run.ranks for call in r.calls())


def _all(run: Run) -> str:
    return "both ranks" if run.world_size == 2 else f"all {run.world_size} ranks"
