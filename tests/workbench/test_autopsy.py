"""How a run ended, in words: the sentences a learner reads."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.comm import ANY, Event
from distlab.runner import Cluster, ErrorRecord, Limits, RankRecord, Run, RunnerError
from distlab.runner.autopsy import (
    Evidence,
    describe,
    describe_tensor,
    error_text,
    evidence,
    explain,
    own_frame,
    place,
)
from tests.workbench.conformance import misbehaviour as programs

HERE = str(Path(__file__).parent / "template_ring.py")


def call(op: str, **facts: Any) -> Event:
    event: Event = {"n": 2, "op": op, "dst": None, "src": None, "tag": 0}
    event |= {"shape": [8], "dtype": "float32", "file": HERE, "line": 41}
    return {**event, **facts}


def waiting(rank: int, op: str, **facts: Any) -> RankRecord:
    return RankRecord(rank=rank, status="waiting", waiting=call(op, **facts))


def raised(rank: int, kind: str, message: str, **facts: Any) -> RankRecord:
    facts = {"frames": ((HERE, 7),), **facts}
    error = ErrorRecord(type=kind, message=message, **facts)
    return RankRecord(rank=rank, status="raised", error=error)


def died(rank: int, exit_status: int | None, output: str = "") -> RankRecord:
    return RankRecord(rank=rank, status="died", exit_status=exit_status, output=output)


def done(rank: int) -> RankRecord:
    return RankRecord(rank=rank, status="finished")


def run(outcome: Any, *ranks: RankRecord, **facts: Any) -> Run:
    n = len(ranks)
    return Run(
        world_size=n, outcome=outcome, ranks=ranks, seconds=0.25, limit_s=10.0, **facts
    )


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


# ── one sentence for each outcome ───────────────────────────────────────────────────


def test_finished() -> None:
    assert explain(run("finished", done(0))) == "1 rank finished in 0.25 s"
    good = run("finished", done(0), done(1))
    assert explain(good) == "2 ranks finished in 0.25 s"
    assert good.require_finished() is good
    assert good.primary() is None


@pytest.mark.parametrize(
    ("ranks", "facts", "sentence"),
    [
        (
            [waiting(0, "send", dst=1), waiting(1, "isend", dst=0)],
            {"cycle": (0, 1)},
            "0→1→0 all wait in send, no rank is in recv",
        ),
        (
            [waiting(0, "recv", src=1), waiting(1, "irecv", src=0)],
            {"cycle": (0, 1)},
            "0→1→0 all wait in recv, no rank is in send",
        ),
        (
            [waiting(0, "barrier"), waiting(1, "recv", src=0)],
            {"cycle": (0, 1)},
            "0→1→0 each waits for the next",
        ),
        (  # a bystander does not blur what the circle is made of
            [
                waiting(0, "send", dst=1),
                waiting(1, "send", dst=0),
                waiting(2, "recv", src=0),
            ],
            {"cycle": (0, 1)},
            "0→1→0 all wait in send, no rank is in recv",
        ),
        (
            [waiting(0, "recv", src=1), done(1)],
            {"waits_for": {0: (1,)}},
            "rank 0 waits in recv ← 1, but rank 1 has already finished",
        ),
        (
            [done(0), waiting(1, "recv", src=2), waiting(2, "all_reduce")],
            {"waits_for": {1: (2,), 2: (0, 1)}},
            "rank 2 waits in all_reduce, but rank 0 has already finished",
        ),
        (
            [waiting(0, "recv", src=ANY)],
            {"waits_for": {0: ()}},
            "rank 0 waits in recv ← any rank, which no rank answers",
        ),
    ],
)
def test_deadlock(
    ranks: list[RankRecord], facts: dict[str, Any], sentence: str
) -> None:
    assert explain(run("deadlock", *ranks, **facts)) == sentence


def test_timeout_names_who_is_busy_and_where() -> None:
    stack = ((HERE, 12), (HERE, 30), ("/usr/lib/python3.12/random.py", 5))
    busy = RankRecord(rank=1, status="running", stack=stack)
    one = run("timeout", waiting(0, "recv", src=1), busy)
    assert explain(one) == (
        "rank 1 had not finished after 10 s; rank 1 was at template_ring.py:30"
    )


def test_timeout_just_as_the_last_rank_ended_names_nobody() -> None:
    ended = run("timeout", done(0), raised(1, "ValueError", "no"))
    assert (
        explain(ended) == f"the run had not come to its end after {ended.limit_s:g} s"
    )


def test_timeout_without_a_busy_rank_names_who_waits() -> None:
    both = run("timeout", waiting(0, "all_reduce"), waiting(1, "all_reduce"))
    assert explain(both) == "ranks 0 and 1 had not finished after 10 s"


def test_raised_names_the_cause_and_who_waited() -> None:
    one = run(
        "raised",
        waiting(0, "recv", src=1),
        raised(1, "KeyError", "'momentum'"),
        waiting(2, "recv", src=1),
    )
    assert explain(one) == (
        "rank 1 raised KeyError: 'momentum' at template_ring.py:7; "
        "ranks 0 and 2 waited for it"
    )
    explained = replace(one, explanation=explain(one))
    with pytest.raises(RunnerError, match="rank 1 raised KeyError"):
        explained.require_finished()


def test_the_primary_failure_is_the_first_that_follows_from_no_other() -> None:
    lost = raised(0, "PeerLost", "rank 0 lost rank 2", peer_lost=True)
    wrapped = raised(1, "RuntimeError", "no state", peer_lost=True)
    dead = died(2, signal.SIGKILL)
    for number, record in enumerate((lost, wrapped, dead)):
        record.failed_s = float(number)
    one = run("died", lost, wrapped, dead)
    assert one.primary() is dead
    assert explain(one) == "rank 2 was killed by SIGKILL"


def test_the_primary_failure_is_the_earliest() -> None:
    late, early = raised(0, "RuntimeError", "late"), raised(1, "KeyError", "early")
    late.failed_s, early.failed_s = 0.2, 0.1
    one = run("raised", late, early)
    assert one.primary() is early


def test_where_all_lost_a_peer_one_of_them_is_named() -> None:
    lost = raised(1, "PeerLost", "rank 1 lost rank 0 in call #2", peer_lost=True)
    one = run("raised", done(0), lost)
    assert one.primary() is lost


@pytest.mark.parametrize(
    ("status", "output", "sentence"),
    [
        (0, "", "rank 0 ended its process (exit status 0) before it was done"),
        (3 << 8, "", "rank 0 ended its process (exit status 3) before it was done"),
        (int(signal.SIGKILL), "", "rank 0 was killed by SIGKILL"),
        (
            int(signal.SIGABRT),
            "terminate called after throwing 'gloo::EnforceNotMet'",
            "rank 0 was ended by the transport (SIGABRT): it received more bytes than "
            "its tensor holds",
        ),
        (None, "", "rank 0 ended without a result"),
    ],
)
def test_died(status: int | None, output: str, sentence: str) -> None:
    assert explain(run("died", died(0, status, output), done(1))) == sentence


def test_several_that_ended_alike_are_named_together() -> None:
    one = run("died", died(0, 9), died(1, 9), done(2))
    assert explain(one) == "ranks 0 and 1 each was killed by SIGKILL"


# ── one line for each rank ──────────────────────────────────────────────────────────


def test_evidence_has_a_line_for_each_rank() -> None:
    busy = RankRecord(rank=4, status="running", stack=((HERE, 3),))
    refusal = raised(5, "CommRefusedError", "rank 5 sends to rank 9", refused="itself")
    one = run(
        "died",
        waiting(0, "send", dst=1, tag=7),
        done(1),
        raised(2, "ValueError", "two\nlines"),
        died(3, 9),
        busy,
        refusal,
    )
    assert evidence(one) == (
        Evidence(
            rank=0,
            state="waiting",
            text="call #2 send → 1 (tag 7)  [8] float32",
            where="template_ring.py:41",
        ),
        Evidence(rank=1, state="finished"),
        Evidence(
            rank=2,
            state="raised",
            text="ValueError: two lines",
            where="template_ring.py:7",
        ),
        Evidence(rank=3, state="died", text="was killed by SIGKILL"),
        Evidence(rank=4, state="busy", where="template_ring.py:3"),
        Evidence(
            rank=5,
            state="refused",
            text="rank 5 sends to rank 9",
            where="template_ring.py:7",
        ),
    )


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (None, "a call"),
        (call("barrier"), "barrier"),
        (call("send", dst=3), "send → 3"),
        (call("recv", src=ANY, tag=2), "recv ← any rank (tag 2)"),
        (call("sendrecv", dst=1, src=2), "sendrecv → 1 ← 2"),
    ],
)
def test_describe(event: Event | None, text: str) -> None:
    assert describe(event) == text


def test_describe_tensor() -> None:
    assert describe_tensor(None) == ""
    assert describe_tensor(call("send")) == "[8] float32"
    into = {"shape": None, "into_shape": [2, 3], "into_dtype": "int64"}
    assert describe_tensor(call("recv", **into)) == "[2, 3] int64"
    assert describe_tensor(call("barrier", shape=None)) == ""


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        ("KeyError", "'x'", "KeyError: 'x'"),
        ("ValueError", "a\n   b", "ValueError: a b"),
        ("NotImplementedError", "NotImplementedError", "NotImplementedError"),
        ("ValueError", "x" * 500, "ValueError: " + "x" * 157 + "..."),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 8 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory: you tried to allocate 8 bytes. (Cannot allocate memory)",
        ),
    ],
)
def test_error_text(kind: str, message: str, text: str) -> None:
    assert error_text(ErrorRecord(type=kind, message=message)) == text


def test_the_own_frame_is_the_learners() -> None:
    import distlab

    ours = str(Path(distlab.__file__).parent / "runner" / "rank.py")
    frames = (
        (ours, 1),
        (HERE, 2),
        (HERE, 3),
        ("<frozen runpy>", 4),
        ("/v/lib/python3.12/site-packages/torch/nn.py", 5),
        (json.__file__, 6),
    )
    assert own_frame(frames) == (HERE, 3)
    reference = ("/c/solutions/phase2_advanced/pipeline_parallel.py", 7)
    assert own_frame((*frames, reference)) == (HERE, 3)
    assert own_frame((reference, frames[0])) == reference
    assert own_frame(frames[:1]) is None
    assert own_frame(()) is None


def test_a_place_is_relative_to_where_one_stands(tmp_path: Path) -> None:
    assert place((HERE, 3)) == "template_ring.py:3"
    assert place((str(tmp_path / "x.py"), 3)) == f"{tmp_path / 'x.py'}:3"
    assert place(None) == place(("", 0)) == ""


# ── real runs ───────────────────────────────────────────────────────────────────────


def test_a_real_deadlock_in_words(cluster: Cluster) -> None:
    ended = cluster.run(programs.ring_of_sends, 3, limits=Limits(seconds=60))
    assert explain(ended) == "0→1→2→0 all wait in send, no rank is in recv"
    for rank, line in enumerate(evidence(ended)):
        assert (line.rank, line.state) == (rank, "waiting")
        assert line.text == f"call #1 send → {(rank + 1) % 3}  [8] float32"
        assert line.where.startswith("conformance/misbehaviour.py:")


def test_a_real_failure_in_words(cluster: Cluster) -> None:
    lines = evidence(cluster.run(programs.one_raises, 2))
    assert [line.state for line in lines] == ["waiting", "raised"]
    assert lines[0].text == "call #1 recv ← 1  [1] float32"
    assert lines[1].text == "KeyError: 'momentum'"


ENDED = (
    "was ended by the transport (SIGABRT): it received more bytes than its tensor holds"
)


@pytest.mark.parametrize(
    ("program", "guilty", "cause"),
    [
        (
            programs.second_box_too_small,
            1,
            "rank 1 called recv into [4] float32, rank 0 called send of [2, 4] float32",
        ),
        (
            programs.reduces_unlike_dtypes,
            0,
            "rank 0 called all_reduce on [4] float32, "
            "rank 1 called all_reduce on [4] float64",
        ),
        (
            programs.broadcasts_unlike_sizes,
            1,
            "rank 1 called broadcast with rank 0 on [4] float32, "
            "rank 0 called broadcast with rank 0 on [8] float32",
        ),
    ],
)
def test_what_the_transport_aborts_for_is_named_from_the_journals(
    cluster: Cluster, program: Any, guilty: int, cause: str
) -> None:
    ended = cluster.run(program, 2, limits=Limits(seconds=60))
    assert ended.outcome == "died"
    assert ended.explanation == f"rank {guilty} {ENDED}; {cause}"
    # Who lost the dead rank failed because of it, and is never named first.
    first = ended.primary()
    assert first is not None
    assert first.rank == guilty


def test_an_abort_of_the_programs_own_is_not_the_transports(cluster: Cluster) -> None:
    ended = cluster.run(programs.kills_itself, 2, "SIGABRT")
    assert ended.explanation.startswith("rank 1 was killed by SIGABRT at misbehaviour")


def test_where_all_calls_fit_no_cause_is_made_up() -> None:
    facts = {"root": None, "group": "world", "into_shape": None, "into_dtype": None}
    same = {"k": "enter", **call("all_reduce", **facts)}
    dead = died(0, int(signal.SIGABRT), "gloo::EnforceNotMet")
    other = done(1)
    dead.journal, other.journal = [same], [same]
    assert explain(run("died", dead, other)) == f"rank 0 {ENDED}"
