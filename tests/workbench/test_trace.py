"""A run as a picture: where calls stand, what is red, and where the page is kept."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.check import check
from distlab.cli.trace import keep_timeline, timeline_path, trace
from distlab.curriculum import Progress
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
from distlab.runner import RankContext, Run
from distlab.runner.cluster import Cluster
from distlab.trace import draw_text, draw_timeline, schedule
from distlab.trace.palette import FAILURE, FAILURE_TEXT
from tests.workbench.course import RING_OF_SENDS, SECOND, Course, keep_warm
from tests.workbench.golden import Golden
from tests.workbench.naming import named
from tests.workbench.traces import ended, event, run_of, stuck_ring

SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg: str, color: str) -> int:
    return len(re.findall(rf'<polygon [^>]*fill="{color}"', svg))


# ── where calls stand ───────────────────────────────────────────────────────────────


def test_a_message_happens_once_both_its_ends_have_begun() -> None:
    run = run_of(
        [event("enter", 1, "recv", src=1), ended(1), event("enter", 2, "recv", src=2),
         ended(2)],
        [event("enter", 1, "send", dst=0), ended(1)],
        [event("enter", 1, "send", dst=0), ended(1)],
    )  # fmt: skip
    plan = schedule(run)
    assert [(a.src, a.dst, a.start) for a in plan.arrows] == [(1, 0, 0), (2, 0, 1)]
    spans = {(b.rank, b.start, b.end) for b in plan.bars}
    assert spans == {(0, 0, 1), (0, 1, 2), (1, 0, 1), (2, 0, 2)}
    assert {bar.state for bar in plan.bars} == {"done"}


def test_any_source_posts_and_collectives() -> None:
    everyone = [event("enter", 3, "all_reduce"), ended(3)]
    run = run_of(
        [event("enter", 1, "recv", src=-1), ended(1, src=2),
         event("enter", 2, "recv", src=1), ended(2), *everyone],
        [event("post", 1, "isend", dst=0), {"k": "wait", "n": 1}, ended(1), *everyone],
        [event("enter", 1, "send", dst=0), ended(1), *everyone],
    )  # fmt: skip
    plan = schedule(run)
    assert {(a.src, a.dst) for a in plan.arrows} == {(2, 0), (1, 0)}
    met = {bar.end for bar in plan.bars if bar.call["op"] == "all_reduce"}
    assert met == {plan.length}
    assert {b.state for b in plan.bars if b.call["op"] == "isend"} == {"posted"}


def test_what_waits_reaches_the_edge_and_what_was_refused_met_nobody() -> None:
    refused = {"k": "error", "n": 1, "type": "X", "message": "", "refused": True}
    run = run_of(
        [event("enter", 1, "send", dst=0), refused],
        [event("enter", 1, "recv", src=0)],
        [],
        outcome="deadlock",
        waits_for={1: (0,)},
    )
    plan = schedule(run)
    states = {bar.rank: (bar.state, bar.end) for bar in plan.bars}
    assert states == {0: ("failed", 1), 1: ("waiting", plan.length)}
    assert not plan.arrows


def test_the_journal_is_believed_where_no_partner_is_known() -> None:
    run = run_of(
        [event("enter", 1, "broadcast", root=0), ended(1),
         event("enter", 2, "barrier"), ended(2)],
        [],
        [],
    )  # fmt: skip
    assert [(b.start, b.end, b.state) for b in schedule(run).bars] == [
        (0, 1, "done"),
        (1, 2, "done"),
    ]


def test_a_long_run_is_cut_and_ends() -> None:
    journal = [
        e
        for n in range(1, 9001)
        for e in (event("enter", n, "barrier", members=[0]), ended(n))
    ]
    plan = schedule(run_of(journal))
    assert len(plan.bars) + plan.left_out == 9000


def test_a_run_as_text_shows_who_waits(golden: Golden) -> None:
    rows = draw_text(stuck_ring())
    assert [row[:14] for row in rows[:3]] == [
        f"rank {r}  send→{(r + 1) % 3}" for r in range(3)
    ]
    assert all("~~~" in row for row in rows[:3])
    run = run_of(
        [event("enter", 1, "recv", src=1), ended(1), event("enter", 2, "recv", src=2),
         ended(2)],
        [event("enter", 1, "send", dst=0), ended(1)],
        [event("enter", 1, "send", dst=0), ended(1)],
    )  # fmt: skip
    first, _, third, _ = draw_text(run)
    assert first.index("recv←2") == third.index("send→0")
    assert "·" in third.partition("send")[0]
    assert "~" not in first + third
    journal = [
        e
        for n in range(1, 99)
        for e in (event("enter", n, "barrier", members=[0]), ended(n))
    ]
    many = draw_text(run_of(*[journal] * 40))
    assert not many[0].startswith("rank ")  # but says that calls are left out
    assert named(many[-2], 24)
    golden("trace/text", "\n".join([*draw_text(stuck_ring()), "", many[0], many[-2]]))


# ── the picture ───────────────────────────────────────────────────────────────────────


def test_a_cycle_is_red_and_says_so(golden: Golden) -> None:
    svg = draw_timeline(stuck_ring())
    assert shapes(svg, FAILURE) == 3
    assert "stroke-dasharray" not in svg
    assert "0→1→2→0" in svg
    titles = [str(t.text) for t in ET.fromstring(svg).iter(f"{SVG}title")]
    call = ("rank 0", "#1", "send → 1", "[1] float32", "template_collectives.py:41")
    assert any(named(title, *call) for title in titles)
    assert any(named(title, "rank 2", 2, 0) for title in titles)
    golden("trace/titles", "\n".join(titles))


def test_nothing_is_red_where_all_went_well() -> None:
    run = run_of([event("enter", 1, "barrier", members=[0]), ended(1)])
    svg = draw_timeline(run)
    assert FAILURE not in svg
    assert FAILURE_TEXT not in svg


def test_who_waits_for_a_late_partner_is_hatched_until_then() -> None:
    late = [event("enter", 1, "barrier", members=[0]), ended(1)]
    late += [event("enter", 2, "send", dst=1), ended(2)]
    early = [event("enter", 1, "recv", src=0), ended(1)]
    title = "<title>rank 1: call #1 recv"
    for first, hatched in ((late, True), (late[2:], False)):
        svg = draw_timeline(run_of(first, early))
        bar = svg[svg.index(title) :].split("</g>")[0]
        assert ("<line" in bar) == hatched


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_every_rank_has_its_lane(world_size: int) -> None:
    svg = draw_timeline(run_of(*[[] for _ in range(world_size)]))
    assert len(re.findall(r">rank \d+<", svg)) == world_size
    ET.fromstring(svg)


def pass_on(context: RankContext) -> None:
    import torch

    box = torch.zeros(2)
    if context.rank > 0:
        context.comm.recv(box, context.rank - 1)
    if context.rank < context.world_size - 1:
        context.comm.send(box, context.rank + 1)


def test_a_real_run(cluster: Cluster) -> None:
    run = cluster.run(pass_on, 3)
    assert [(a.src, a.dst) for a in schedule(run).arrows] == [(0, 1), (1, 2)]


# ── where it is kept ────────────────────────────────────────────────────────────────


def test_a_check_draws_for_mine_and_says_so_unless_it_is_json(
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    keep_warm(cluster, monkeypatch)
    course.fill(SECOND, RING_OF_SENDS)
    drawn = course.state / "last" / "trace.html"
    assert check(["1.2"], code=str(course.template())) == 1
    assert not drawn.exists()
    capsys.readouterr()
    assert check(["1.2"], as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["exit"] == 1
    assert "0→1→2→0" in drawn.read_text()
    assert check(["1.2"]) == 1
    assert named(capsys.readouterr().out, "../state/last/trace.html")


def traces_in(page: Path) -> list[dict[str, Any]]:
    """What the page's own script reads."""
    found = re.search(r'id="trace-data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return list(json.loads(found[1])["traces"])


@pytest.mark.parametrize("limit_s", [20.0, 0.001])
def test_the_reference_does_the_same_below_without_its_source(
    limit_s: float,
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    monkeypatch.setattr("distlab.grading.beside.LIMIT_S", limit_s)
    keep_warm(cluster, monkeypatch)
    course.fill(SECOND, RING_OF_SENDS)
    page = course.state / "last" / "trace.html"
    assert check(["1.2"]) == 1
    told = capsys.readouterr()
    assert "0→1→2→0" in told.out
    assert "trace.html" in told.out  # it could be drawn
    assert not told.err
    assert len(traces_in(page)) == 1  # the reference would show how it is done
    Progress(course.root).record_verdict(SECOND, passed=True, digest="of another day")
    assert check(["1.2"]) == 1
    text = page.read_text()
    mine, *right = traces_in(page)
    assert mine["never"]
    assert any("comm.send" in site[2] for site in mine["sites"])
    assert len(right) == (limit_s > 1)  # what takes too long is not waited for
    for one in right:
        assert one["title"] != mine["title"]
        assert one["ranks"] == mine["ranks"]
        assert named(one["sentence"], one["ranks"])
        assert (one["never"], one["messages"]["length"]) == ([], one["ranks"])
        assert one["sites"] == [["", 0, ""]]
    assert "comm.sendrecv" not in text
    assert "solutions/" not in text


def verdict_with(run: Run | None) -> TaskVerdict:
    clause = ClauseVerdict(
        id="C1", text="", status="fail", world_size=3, message="stuck", run=run
    )
    return TaskVerdict(
        id="a.b", number="1.2", title="", status="fail", path="", digest="",
        clauses=[clause],
    )  # fmt: skip


def test_the_last_timeline(
    golden: Golden,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.delenv("DISTLAB_STATE", raising=False)
    progress = Progress(course.root)
    assert trace() == 1
    golden("trace/none yet", capsys.readouterr().out)
    assert keep_timeline(progress, verdict_with(None)) == []
    assert (
        keep_timeline(progress, replace(verdict_with(stuck_ring()), is_plan=True)) == []
    )
    assert not timeline_path(progress).exists()
    ((style, text),) = keep_timeline(progress, verdict_with(stuck_ring()))
    assert style == "dim"
    assert named(text, ".distlab/last/trace.html")
    assert trace() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == ["1.2 a.b C1: 3 ranks", ".distlab/last/trace.html", ""]
    assert out[3:] == draw_text(stuck_ring())  # no browser here

    # what cannot be written, or drawn, changes nothing else
    timeline_path(progress).unlink()
    timeline_path(progress).mkdir()
    assert keep_timeline(progress, verdict_with(stuck_ring())) == []
    assert not capsys.readouterr().err
    broken = run_of([{"k": "enter", "n": 1}])
    assert keep_timeline(progress, verdict_with(broken)) == []
    assert capsys.readouterr().err
