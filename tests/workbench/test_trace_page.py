"""The page about a run: one whole file that asks for nothing and escapes all."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from typing import Any

import numpy as np
import pytest

from distlab.runner import Run
from distlab.sim import AlphaBeta, Fabric, Network, run
from distlab.trace import packed as packing
from distlab.trace import page
from distlab.trace.links import PARTS
from distlab.trace.story import story
from tests.workbench.golden import Golden
from tests.workbench.naming import named
from tests.workbench.traces import call, push, ring, run_of, stuck_ring

NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)
HOSTILE = "</script><script>document.title='bad'</script><b>.py"


def data_of(text: str) -> dict[str, Any]:
    """What the page's own script reads."""
    found = re.search(r'id="trace-data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def outside(text: str) -> list[str]:
    """Everything in a page with which a browser could ask for something elsewhere."""
    text = re.sub(r'(id="trace-data">).*?</script>', r"\1</script>", text, flags=re.S)
    asks = (
        r"<(?:img|link|iframe|object|embed|audio|video|base|form)\b[^>]*>",
        r"<[^>]+\b(?:src|href|action|srcset)\s*=[^>]*>",
        r"@import[^;]*;",
        r"url\([^)]*\)",
        r"""["'`](?:https?|wss?|ftp):[^"'`]*["'`]""",
        r"\b(?:fetch|import|importScripts|XMLHttpRequest|WebSocket|EventSource)\s*\(",
        r"\bsendBeacon\b",
    )
    return [found for ask in asks for found in re.findall(ask, text)]


def values_of(column: list[Any]) -> list[int]:
    """The numbers of a packed column."""
    width, text = column
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    steps = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<i{width}")
    return [int(value) for value in steps.astype(np.int64).ravel().cumsum()]


# ── the file ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("done", [stuck_ring(), run_of([], [])], ids=["stuck", "empty"])
def test_the_page_is_one_file_that_asks_for_nothing(done: Run) -> None:
    text = page(done, title="1.2 <b>", verdict="a & b")
    assert outside(text) == []
    assert "<h1>1.2 &lt;b&gt;</h1>" in text
    assert '<p class="sentence">a &amp; b</p>' in text
    assert len(text) < 100_000


@pytest.mark.parametrize(
    "harm",
    [
        '<img src="http://example.org/x.png">',
        '<script src="//example.org/x.js"></script>',
        '<link rel="stylesheet" href="x.css">',
        "<style>@import 'x.css';</style>",
        "<style>p { background: url(x.png) }</style>",
        "<script>fetch('x')</script>",
        '<script>const a = "https://example.org"</script>',
        "<script>navigator.sendBeacon(a)</script>",
    ],
)
def test_a_page_that_asks_for_something_is_caught(harm: str) -> None:
    assert outside(page(stuck_ring()).replace("</body>", f"{harm}</body>"))


def test_the_policy_allows_this_style_and_this_script_and_nothing_else() -> None:
    text = page(stuck_ring())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    for tag in ("style", "script"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert body
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r"<[^>]+\s(?:style|on\w+)=", text)


def test_no_name_can_end_the_script_or_become_markup() -> None:
    text = page(stuck_ring(file=HOSTILE), title=HOSTILE, verdict=HOSTILE)
    assert text.count("</script>") == 2
    assert "<b>.py" not in text
    assert data_of(text)["traces"][0]["sites"][0][0].endswith(HOSTILE)


def words_of(text: str) -> str:
    """What a page says without its script: a line for each part."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    words = html.unescape(re.sub(r"<[^>]+>", "\n", body))
    return "\n".join(line.strip() for line in words.splitlines() if line.strip())


def test_all_is_there_in_words_too(golden: Golden) -> None:
    text = page(stuck_ring())
    assert "0→1→2→0" in text
    for line in story(stuck_ring()):
        assert html.escape(line) in text
    assert text.count("<td>waiting</td>") == 3
    call = ("#1", "send → 1", "[1] float32", "template_collectives.py:41")
    assert named(text.rpartition("<table")[2], *call)
    large = page(stuck_ring(200))
    assert large.count("<tr>") == 65
    assert named(large.rpartition("<tr>")[2], 200 - 64)
    golden("trace/page", words_of(text))


def test_columns_come_back_as_they_were() -> None:
    chance = np.random.default_rng(3)
    for numbers in (
        np.array([], np.int64),
        np.array([5]),
        chance.integers(-9, 9, 100),
        np.array([-(1 << 31), (1 << 31) - 1]),
        chance.integers(0, 1 << 52, 100),
    ):
        width, text = packing.column(numbers)
        assert values_of([width, text]) == numbers.tolist()
    assert packing.column(np.array([1, 2]))[0] == 4
    assert packing.column(np.array([0, 1 << 31]))[0] == 8


def test_of_too_many_messages_the_first_are_kept_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run(ring, 8, 8, net=NET, journal=False)
    monkeypatch.setattr(packing, "_SAMPLE", 20)
    monkeypatch.setattr(packing, "MAX_BYTES", 800)
    text = page(done)
    (trace,) = data_of(text)["traces"]
    kept = trace["messages"]["length"]
    assert 0 < kept < 112
    assert named(words_of(text), 112, kept)
    starts = values_of(trace["messages"]["columns"]["start"])
    assert starts == sorted(m.start_ps for m in done.trace)[:kept]


@pytest.mark.parametrize(
    ("net", "busiest"),
    [
        (NET, "rank0.in"),
        (Fabric(node_size=2, nic_bytes_per_s=1e9), "leaf0.down0"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_ways_in_count_as_much_as_ways_out(
    net: Network, busiest: str, many: bool
) -> None:
    """All send to rank 0 at once: each way out is seldom in use, its way in always."""
    n = 100 if many else 4
    done = run(push, n, 1000, net=net, journal=False)
    text = page(done)
    (trace,) = data_of(text)["traces"]
    mean, most = (
        np.frombuffer(zlib.decompress(base64.b64decode(trace["strip"][name])), np.uint8)
        for name in ("mean", "most")
    )
    end = max(message.end_ps for message in done.trace)
    used = {(way, rank): np.zeros(PARTS) for way in ("out", "in") for rank in range(n)}
    edges = np.linspace(0, end, PARTS + 1)
    for way, rank in used:
        spans = sorted(
            (m.start_ps, m.end_ps)
            for m in done.trace
            if rank == (m.src if way == "out" else m.dst)
        )
        for start, stop in spans:
            inside = np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start)
            used[way, rank] += np.clip(inside, 0, None) / (end / PARTS)
    whole = np.array(list(used.values())).clip(0, 1)
    assert mean / 255 == pytest.approx(whole.mean(axis=0), abs=0.003)
    assert most / 255 == pytest.approx(whole.max(axis=0), abs=0.003)
    # In figures: the links that the network itself has kept count of.
    shares = {name: ps / end for name, ps in done.links.items()}
    first = max(shares, key=lambda name: shares[name])
    assert first == busiest
    (line, *_) = (line for line in words_of(text).splitlines() if first in line)
    assert re.search(rf"[^,%]* {re.escape(first)} {shares[first]:.0%}", line)


def test_of_real_ranks_both_ways_are_named() -> None:
    text = page(run_of(call(1, "send", 0, 2, dst=1), call(1, "recv", 1, 4, src=0), []))
    assert re.findall(r"(rank\d\.\w+) [1-9]\d*%", text) == ["rank0.out", "rank1.in"]
    assert re.search(r"\brank\d\.\w+ 0%", text)


def test_very_many_ranks_are_counted_together() -> None:
    done = run(ring, 130, 4, net=NET, journal=False)
    text = page(done)
    (trace,) = data_of(text)["traces"]
    overview = trace["overview"]
    assert (overview["rows"], overview["groups"], overview["group"]) == (130, 65, 2)
    cells = values_of(overview["matrix"])
    assert sum(cells) == sum(message.num_bytes for message in done.trace)
    assert np.count_nonzero(cells) == 130  # each group to itself, and to the next
    assert len(text) < 400_000
