"""Runs as tables: calls, messages, links, and what is worked out from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distlab.runner.cluster import Cluster
from distlab.runner.pairs import pairs
from distlab.sim import AlphaBeta, Faults, run
from distlab.trace import bus_bandwidth, utilisation
from distlab.trace.journals import trace_of
from distlab.trace.links import PARTS, shares
from distlab.trace.model import NONE, STATES, Trace
from distlab.trace.story import story
from tests.workbench.golden import Golden
from tests.workbench.naming import named, numbers
from tests.workbench.traces import (
    call,
    ended,
    event,
    ring,
    run_of,
    stand_still,
    star,
    talk,
)

S = 10**12  # picoseconds
NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)


# ── who belongs together ────────────────────────────────────────────────────────────


def test_channels_are_kept_apart_by_group_and_tag_and_refused_calls_met_nobody() -> (
    None
):
    refused = {"k": "error", "n": 1, "t": 0.0, "type": "X", "message": "",
               "refused": True}  # fmt: skip
    done = run_of(
        [event("enter", 1, "send", dst=1), refused,
         *call(2, "send", 0, 1, dst=1, group="world/1:0,1"),
         *call(3, "send", 1, 2, dst=1, tag=7), *call(4, "send", 2, 3, dst=1)],
        [*call(1, "recv", 0, 3, src=0), event("enter", 2, "recv", src=-1, tag=7),
         ended(2, 2, src=0), *call(3, "recv", 0, 1, src=0, group="world/1:0,1")],
    )  # fmt: skip
    met = {(p.tag, p.sent["n"], p.received["n"]) for p in pairs(done.ranks)}
    assert met == {(0, 2, 3), (7, 3, 2), (0, 4, 1)}


# ── the tables ──────────────────────────────────────────────────────────────────────


def test_times_states_and_lines_of_real_ranks(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first\ncomm.recv(box)\n")
    done = run_of(
        call(1, "recv", 100.5, 103.5, src=1, file=str(file), line=2),
        [event("post", 1, "isend", 102.0, dst=0),
         {"k": "wait", "n": 1, "file": "a.py", "line": 9, "t": 103.0}, ended(1, 104.0)],
        [event("enter", 1, "barrier", 103.0)],
        outcome="deadlock",
    )  # fmt: skip
    trace = trace_of(done)
    assert (trace.clock, trace.world_size) == ("wall", 3)
    recv, post, wait, stuck = (trace.calls.row(i) for i in range(4))
    assert [recv[k] / S for k in ("start_ps", "ready_ps", "end_ps")] == [0, 1.5, 3]
    assert recv["last"] == 1  # the isend came later
    states = [STATES[row["state"]] for row in (recv, post, wait, stuck)]
    assert states == ["done", "posted", "done", "waiting"]
    assert [trace.ops[row["op"]] for row in (post, wait)] == ["isend", "wait"]
    assert stuck["end_ps"] == trace.end_ps > 3.5 * S
    site = trace.sites[recv["site"]]
    assert (site.line, site.text) == (2, "comm.recv(box)")
    assert len(trace.messages) == 1
    message = trace.messages.row(0)
    assert (message["start_ps"], message["end_ps"]) == (1.5 * S, 3 * S)
    assert [message[k] for k in ("sent", "received", "sent_end", "received_end")] == [
        1, 0, 2, 0,
    ]  # fmt: skip


def test_a_collective_waits_for_the_last_one() -> None:
    trace = trace_of(run_of(*(call(1, "all_reduce", start, 9) for start in (1, 5, 3))))
    assert trace.calls["ready_ps"].tolist() == [4 * S] * 3
    assert trace.calls["last"].tolist() == [1] * 3


def test_every_message_of_a_simulation_has_its_calls() -> None:
    done = run(ring, 5, 100, net=NET)
    trace = trace_of(done)
    calls, messages = trace.calls, trace.messages
    assert len(messages) == len(done.trace) == 40
    assert trace.end_ps == round(done.seconds * S)
    for row in range(len(messages)):
        m = messages.row(row)
        assert calls["rank"][m["sent"]] == m["src"]
        assert calls["rank"][m["received"]] == m["dst"]
        begun = [calls["start_ps"][m[end]] for end in ("sent", "received")]
        assert m["start_ps"] == max(begun)
        assert m["end_ps"] <= min(calls["end_ps"][m[e]] for e in ("received_end",))
    assert set(trace.labels) >= {"isend → 1", "recv ← 4", "wait: isend → 1"}
    assert trace.num_steps > 0


def test_without_journals_there_are_messages_all_the_same() -> None:
    trace = trace_of(run(ring, 4, 100, net=NET, journal=False))
    assert len(trace.calls) == 0
    assert len(trace.messages) == 24
    assert set(trace.messages["sent"].tolist()) == {NONE}


def test_a_real_run_gives_the_same_tables(cluster: Cluster) -> None:
    done = cluster.run(ring, 3, 100)
    trace, simulated = trace_of(done), trace_of(run(ring, 3, 100, net=NET))
    assert trace.clock == "wall"
    for name in ("rank", "number", "num_bytes"):
        assert trace.calls[name].tolist() == simulated.calls[name].tolist()
    both = [
        sorted(zip(*(t.messages[n].tolist() for n in ("src", "dst")), strict=True))
        for t in (trace, simulated)
    ]
    assert both[0] == both[1]
    waits = trace.calls["op"] == trace.ops.index("wait")
    assert waits.sum() == 12
    assert (trace.calls["end_ps"] >= trace.calls["start_ps"]).all()


def test_a_star_leaves_its_later_ranks_waiting() -> None:
    trace = trace_of(run(star, 4, 1000, net=NET))
    waited = trace.calls["ready_ps"] - trace.calls["start_ps"]
    by_rank = {int(r): int(w) for r, w in zip(trace.calls["rank"], waited, strict=True)}
    took = round((2e-6 + 4000 / 1e9) * S)
    assert [by_rank[rank] for rank in (1, 2, 3)] == [0, took, 2 * took]


# ── links ───────────────────────────────────────────────────────────────────────────


def test_shares_of_time_against_counting_picoseconds() -> None:
    chance = np.random.default_rng(7)
    end, parts = 1200, 12
    starts = chance.integers(0, end, 40)
    ends = np.minimum(starts + chance.integers(0, 300, 40), end)
    ranks = chance.integers(0, 3, 40)
    trace = Trace(
        world_size=3, clock="virtual", outcome="finished", end_ps=end,
        calls=trace_of(run_of([])).calls, messages=trace_of(run_of([])).messages,
    )  # fmt: skip
    found = shares(trace, ranks, starts, ends, parts)
    counted = np.zeros((3, end))
    for rank, start, stop in zip(ranks, starts, ends, strict=True):
        counted[rank, start:stop] += 1
    expected = counted.reshape(3, parts, -1).mean(axis=2).clip(0, 1)
    assert found == pytest.approx(expected)


def test_the_bus_bandwidth_of_a_ring_is_the_speed_of_its_links() -> None:
    net = AlphaBeta(alpha_s=0, bytes_per_s=2e9)
    for n in (2, 5, 8):
        done = run(ring, n, 1000, net=net)
        assert bus_bandwidth(done, 4000 * n) == pytest.approx(2e9)
        used = [link.mean for link in utilisation(done)]
        assert used == pytest.approx([1.0] * 2 * n)
    with pytest.raises(ValueError, match=r"\bbarrier\b"):
        bus_bandwidth(done, 1, "barrier")
    with pytest.raises(ValueError, match="time"):
        bus_bandwidth(run(ring, 1, 1), 1)


def test_the_busiest_link_comes_first() -> None:
    done = run(talk, 3, [(2, 0), (2, 1), (1, 0)], net=NET)
    first, *rest = utilisation(done)
    assert first.name in ("rank2.out", "rank0.in")
    carries = 16 / 1e9  # seconds that the bytes of one message take
    assert first.mean == pytest.approx(2 * carries / done.seconds)
    assert [link.mean for link in rest] == sorted(
        (link.mean for link in rest), reverse=True
    )
    # a run that does not know its network is judged by its messages
    (first, *_) = utilisation(replace(done, links={}))
    assert (first.name, len(first.busy)) == ("rank2.out", PARTS)
    assert first.mean == pytest.approx(2 / 3, abs=1 / PARTS)


# ── what went wrong ─────────────────────────────────────────────────────────────────


def test_a_lost_message_is_marked_and_told(golden: Golden) -> None:
    faults = Faults(loss=0.4, seed=3)
    done = run(talk, 3, [(0, 1), (0, 1), (2, 0)] * 3, net=NET, faults=faults)
    trace = trace_of(done)
    assert done.outcome == "deadlock"
    assert trace.messages["lost"].sum() == len(done.lost) > 0
    gone = trace.messages.only(trace.messages["lost"] == 1)
    assert gone["src"].tolist() == [loss.src for loss in done.lost]
    told = "\n".join(story(done))
    assert any(
        named(told, f"to rank {loss.dst}", f"rank {loss.src}") for loss in done.lost
    )
    golden("trace/lost message", told)
    waiting = {r.rank for r in done.ranks if r.status == "waiting"}
    assert set(trace.stuck) == waiting


def test_without_journals_too_it_is_known_who_waits_for_ever() -> None:
    done = run(stand_still, 5, net=NET, journal=False)
    trace = trace_of(done)
    assert sorted(trace.stuck) == list(range(5))
    assert {since for since, _ in trace.stuck.values()} < {0, trace.end_ps}
    told = story(done)
    circle = [numbers(line)[:2] for line in told[:5]]
    assert circle == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]
