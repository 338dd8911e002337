"""How a run ended, in words: the sentences a learner reads."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.comm import ANY, Event
from distlab.runner import Cluster, ErrorRecord, Limits, RankRecord, Run, RunnerError
from distlab.runner.autopsy import (
    describe,
    describe_tensor,
    error_text,
    evidence,
    explain,
    own_frame,
    place,
)
from tests.workbench.conformance import misbehaviour as programs
from tests.workbench.golden import Golden
from tests.workbench.naming import named, numbers

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

STACK = ((HERE, 12), (HERE, 30), ("/usr/lib/python3.12/random.py", 5))
ABORTED = "terminate called after throwing 'gloo::EnforceNotMet'"

# Each with what its sentence has to name, in this order.
ENDINGS: dict[str, tuple[Run, tuple[object, ...]]] = {
    "finished, one": (run("finished", done(0)), (1, "0.25")),
    "finished, two": (run("finished", done(0), done(1)), (2, "0.25")),
    "deadlock of sends": (
        run(
            "deadlock",
            waiting(0, "send", dst=1),
            waiting(1, "isend", dst=0),
            cycle=(0, 1),
        ),
        ("ranks 0 and 1", "send", "recv"),
    ),
    "deadlock of receives": (
        run(
            "deadlock",
            waiting(0, "recv", src=1),
            waiting(1, "irecv", src=0),
            cycle=(0, 1),
        ),
        ("ranks 0 and 1", "recv", "send"),
    ),
    "deadlock of a barrier and a receive": (
        run("deadlock", waiting(0, "barrier"), waiting(1, "recv", src=0), cycle=(0, 1)),
        ("ranks 0 and 1",),
    ),
    # a bystander does not blur what the circle is made of
    "deadlock with a bystander": (
        run(
            "deadlock",
            waiting(0, "send", dst=1),
            waiting(1, "send", dst=0),
            waiting(2, "recv", src=0),
            cycle=(0, 1),
        ),
        ("ranks 0 and 1", "send", "recv"),
    ),
    "deadlock, its peer has finished": (
        run("deadlock", waiting(0, "recv", src=1), done(1), waits_for={0: (1,)}),
        ("rank 0", "recv", "rank 1"),
    ),
    "deadlock, one of the others has finished": (
        run(
            "deadlock",
            done(0),
            waiting(1, "recv", src=2),
            waiting(2, "all_reduce"),
            waits_for={1: (2,), 2: (0, 1)},
        ),
        ("rank 2", "all_reduce", "rank 0"),
    ),
    "deadlock, any source": (
        run("deadlock", waiting(0, "recv", src=ANY), waits_for={0: ()}),
        ("rank 0", "recv from any rank"),
    ),
    "timeout, one is busy": (
        run(
            "timeout",
            waiting(0, "recv", src=1),
            RankRecord(rank=1, status="running", stack=STACK),
        ),
        ("rank 1", 10, "rank 1", "template_ring.py:30"),
    ),
    "timeout, as the last rank ended": (
        run("timeout", done(0), raised(1, "ValueError", "no")),
        (10,),
    ),
    "timeout, all wait": (
        run("timeout", waiting(0, "all_reduce"), waiting(1, "all_reduce")),
        (0, 1, 10),
    ),
    "raised, two waited": (
        run(
            "raised",
            waiting(0, "recv", src=1),
            raised(1, "KeyError", "'momentum'"),
            waiting(2, "recv", src=1),
        ),
        ("rank 1", "KeyError", "template_ring.py:7", "'momentum'", 0, 2),
    ),
    "exit 0": (run("died", died(0, 0), done(1)), ("rank 0", 0)),
    "exit 3": (run("died", died(0, 3 << 8), done(1)), ("rank 0", 3)),
    "killed": (
        run("died", died(0, int(signal.SIGKILL)), done(1)),
        ("rank 0", "SIGKILL"),
    ),
    "aborted by the transport": (
        run("died", died(0, int(signal.SIGABRT), ABORTED), done(1)),
        ("rank 0", "SIGABRT"),
    ),
    "no result": (run("died", died(0, None), done(1)), ("rank 0",)),
    "two ended alike": (
        run("died", died(0, 9), died(1, 9), done(2)),
        (0, 1, "SIGKILL"),
    ),
    "finished, one died as declared": (
        run("finished", done(0), died(1, 9), done(2)),
        (2, "0.25", "rank 1", "SIGKILL"),
    ),
    "a service died": (
        run(
            "died",
            waiting(0, "recv", src=1),
            services={"ps": replace(died(0, 9), failed_s=0.1)},
        ),
        ('"ps"', "SIGKILL"),
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_sentence_names_who_and_where(ending: str) -> None:
    ended, values = ENDINGS[ending]
    text = explain(ended)
    assert named(text, *values), text
    mentioned = {value for value in numbers(text.replace("→", " → ")) if value != 10}
    expected = numbers(" ".join(map(str, values)).replace("→", " → "))
    assert mentioned == {value for value in expected if value != 10}  # and nobody else


def test_the_sentences(golden: Golden) -> None:
    texts = [f"{name}: {explain(ended)}" for name, (ended, _) in ENDINGS.items()]
    golden("autopsy/sentences", "\n".join(texts))


def test_who_finished_has_no_failure() -> None:
    good = run("finished", done(0), done(1))
    assert good.require_finished() is good
    assert good.primary() is None


def test_a_run_that_had_to_finish_explains_itself() -> None:
    one, _ = ENDINGS["raised, two waited"]
    explained = replace(one, explanation=explain(one))
    with pytest.raises(RunnerError) as failed:
        explained.require_finished()
    assert str(failed.value) == explain(one)


def test_the_primary_failure_is_the_first_that_follows_from_no_other() -> None:
    lost = raised(0, "PeerLost", "rank 0 lost rank 2", peer_lost=True)
    wrapped = raised(1, "RuntimeError", "no state", peer_lost=True)
    dead = died(2, signal.SIGKILL)
    for number, record in enumerate((lost, wrapped, dead)):
        record.failed_s = float(number)
    one = run("died", lost, wrapped, dead)
    assert one.primary() is dead
    assert named(explain(one), "rank 2", "SIGKILL")
    assert numbers(explain(one)) == [2]


def test_the_primary_failure_is_the_earliest() -> None:
    late, early = raised(0, "RuntimeError", "late"), raised(1, "KeyError", "early")
    late.failed_s, early.failed_s = 0.2, 0.1
    one = run("raised", late, early)
    assert one.primary() is early


def test_where_all_lost_a_peer_one_of_them_is_named() -> None:
    lost = raised(1, "PeerLost", "rank 1 lost rank 0 in call #2", peer_lost=True)
    one = run("raised", done(0), lost)
    assert one.primary() is lost


# ── one line for each rank ──────────────────────────────────────────────────────────


def test_evidence_has_a_line_for_each_rank(golden: Golden) -> None:
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
    lines = evidence(one)
    assert [(line.rank, line.state, line.where) for line in lines] == [
        (0, "waiting", "template_ring.py:41"),
        (1, "finished", ""),
        (2, "raised", "template_ring.py:7"),
        (3, "died", ""),
        (4, "busy", "template_ring.py:3"),
        (5, "refused", "template_ring.py:7"),
    ]
    for line, values in zip(
        lines, ((2, "send → 1", 7), (), ("ValueError",), ("SIGKILL",), (), (5, 9)),
        strict=True,
    ):  # fmt: skip
        assert named(line.text, *values)
    texts = [f"{line.rank}  {line.state}  {line.text}".rstrip() for line in lines]
    golden("autopsy/evidence", "\n".join(texts))


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
    assert named(explain(ended), "0→1→2→0", "send", "recv")
    for rank, line in enumerate(evidence(ended)):
        assert (line.rank, line.state) == (rank, "waiting")
        assert named(line.text, "#1", f"send → {(rank + 1) % 3}", "[8] float32")
        assert line.where.startswith("conformance/misbehaviour.py:")


def test_a_real_failure_in_words(cluster: Cluster) -> None:
    lines = evidence(cluster.run(programs.one_raises, 2))
    assert [line.state for line in lines] == ["waiting", "raised"]
    assert named(lines[0].text, "#1", "recv ← 1", "[1] float32")
    assert named(lines[1].text, "KeyError", "'momentum'")


@pytest.mark.parametrize(
    ("program", "guilty", "parts"),
    [
        (
            programs.second_box_too_small,
            1,
            ("rank 1", "recv", "[4] float32", "rank 0", "send", "[2, 4] float32"),
        ),
        (
            programs.reduces_unlike_dtypes,
            0,
            (
                *("rank 0", "all_reduce", "[4] float32"),
                *("rank 1", "all_reduce", "[4] float64"),
            ),
        ),
        (
            programs.broadcasts_unlike_sizes,
            1,
            (
                *("rank 1", "broadcast", "rank 0", "[4] float32"),
                *("rank 0", "broadcast", "rank 0", "[8] float32"),
            ),
        ),
    ],
)
def test_what_the_transport_aborts_for_is_named_from_the_journals(
    cluster: Cluster, program: Any, guilty: int, parts: tuple[str, ...]
) -> None:
    ended = cluster.run(program, 2, limits=Limits(seconds=60))
    assert ended.outcome == "died"
    assert named(ended.explanation, f"rank {guilty}", "SIGABRT", *parts)
    # Who lost the dead rank failed because of it, and is never named first.
    first = ended.primary()
    assert first is not None
    assert first.rank == guilty


def test_an_abort_of_the_programs_own_is_not_the_transports(cluster: Cluster) -> None:
    ended = cluster.run(programs.kills_itself, 2, "SIGABRT")
    killed, _, meaning = ended.explanation.partition("(")
    assert named(killed, "rank 1", "SIGABRT")
    assert re.search(r" misbehaviour\.py:\d+ $", killed)
    assert meaning  # of the signal, and nothing of the transport
    assert numbers(meaning) == []


def test_where_all_calls_fit_no_cause_is_made_up() -> None:
    facts = {"root": None, "group": "world", "into_shape": None, "into_dtype": None}
    same = {"k": "enter", **call("all_reduce", **facts)}
    dead = died(0, int(signal.SIGABRT), "gloo::EnforceNotMet")
    other = done(1)
    dead.journal, other.journal = [same], [same]
    text = explain(run("died", dead, other))
    assert named(text, "rank 0", "SIGABRT")
    assert numbers(text) == [0]
    assert "all_reduce" not in text
