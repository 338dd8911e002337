"""The page about a run in a real browser: drawn, moved about, clicked; no network."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from distlab.runner import Run
from distlab.sim import AlphaBeta, run
from distlab.trace import page, to_html
from tests.browser import PROGRAM, Browser, browser
from tests.workbench.naming import named
from tests.workbench.traces import event, ring, run_of, star, stuck_ring

NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)
HOSTILE = "</script><script>document.title='bad'</script><b>.py"


@pytest.fixture(scope="module")
def web() -> Iterator[Browser]:
    if PROGRAM is None:
        reason = "no chromium here: the page is not tried in a browser"
        print(reason)
        pytest.skip(reason)
    with browser() as one:
        one.resize(1200, 900)
        yield one


def shown(web: Browser, path: Path, done: Run, fragment: str = "", **more: Any) -> None:
    to_html(done, path / "run.html", **more)
    web.open(path / "run.html", fragment)


def spot(web: Browser, source: str) -> tuple[float, float]:
    """A point on the first panel: `source` gives x and y on its canvas."""
    x, y = web.script(
        f"(() => {{ const panel = panels[0], f = panel.frame;"
        f" const box = panel.main.getBoundingClientRect(); const [x, y] = {source};"
        " return [box.left + x, box.top + y]; })()"
    )
    return x, y


def look(web: Browser) -> tuple[float, float]:
    """From when to when the picture shows the run."""
    web.settled()
    shown = web.script("[view.from, view.to]")
    return shown[0], shown[1]


def color_at(web: Browser, source: str) -> str:
    """The color of the picture at a point of the first panel, by its name."""
    name = web.script(
        f"(() => {{ const panel = panels[0], f = panel.frame, c = colorsNow();"
        f" const [x, y] = {source}; const at = [Math.round(x), Math.round(y), 1, 1];"
        " const seen = [...panel.ctx.getImageData(...at).data.slice(0, 3)];"
        " const off = (name) => Math.max(...channels(c[name]).map("
        "   (v, i) => Math.abs(v - seen[i])));"
        " return Object.keys(c).find((name) => off(name) < 3) || String(seen); })()"
    )
    return str(name)


def details(web: Browser) -> str:
    web.settled()
    return str(web.script("document.getElementById('details').innerText"))


def test_a_deadlock_explains_itself_and_its_line_is_a_click_away(
    web: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("\n" * 40 + "comm.send(box, right)\n")
    shown(web, tmp_path, stuck_ring(4, file=str(file)))
    assert web.requests() == web.complaints() == []
    assert web.script("document.querySelectorAll('.story p').length") >= 5
    assert web.script("view.clock") == "steps"
    edge = "[f.x(view.from) + 300, f.y(2) - Math.round(f.bar / 2)]"
    assert color_at(web, edge) == "stuck"
    web.click(*spot(web, "[f.right - 60, f.y(2)]"))
    said = details(web)
    assert named(said, "rank 2", "send → 3")
    assert named(said, "mine.py:41", "comm.send(box, right)")


def test_a_click_on_a_message_shows_its_call_site(web: Browser, tmp_path: Path) -> None:
    shown(web, tmp_path, run(star, 4, 1000, net=NET))
    assert web.requests() == web.complaints() == []
    middle = (
        "(() => { const [x, y, toX, toY] = endsOf(panel, view, 1);"
        " return [(x + toX) / 2, (y + toY) / 2]; })()"
    )
    web.click(*spot(web, middle))
    said = details(web)
    assert named(said, "rank 2", "rank 0")
    assert "4 kB" in said
    assert named(said, "6 µs", "12 µs", "6 µs")
    sent, received = re.findall(r"traces\.py:\d+ +(.*)", said)
    assert "send(box," in sent
    assert "recv(box," in received
    assert web.script("document.documentElement.dataset.picked") == "m1"
    moves, waits = "(view.to * 0.5)", "(view.to * 0.1)"
    assert color_at(web, f"[f.x{moves} + 40, f.y(2) + f.bar / 2 - 3]") == "move"
    assert color_at(web, f"[f.x{waits}, f.y(3)]") == "wait"


def test_wheel_drag_and_keys_change_what_is_shown(web: Browser, tmp_path: Path) -> None:
    done = run(ring, 4, 1000, net=NET)
    shown(web, tmp_path, done)
    whole = look(web)
    assert whole == (0, pytest.approx(done.seconds * 1e12))
    x, y = spot(web, "[f.x(view.to / 2), f.y(1)]")
    web.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    near = look(web)
    assert near[1] - near[0] == pytest.approx(0.8 * whole[1])
    assert sum(near) / 2 == pytest.approx(whole[1] / 2)
    web.mouse("mousePressed", x, y, button="left", clickCount=1)
    web.mouse("mouseMoved", x - 50, y, button="left", buttons=1)
    web.mouse("mouseReleased", x - 50, y, button="left", clickCount=1)
    dragged = look(web)
    assert dragged[0] > near[0]
    assert dragged[1] - dragged[0] == pytest.approx(near[1] - near[0])
    web.script("panels[0].main.focus()")
    web.key("+")
    closer = look(web)
    assert closer[1] - closer[0] == pytest.approx(0.7 * (near[1] - near[0]))
    web.key("ArrowLeft")
    assert look(web)[0] < closer[0]
    web.key("Home")
    assert look(web) == whole
    web.key("n")
    web.key("ArrowDown")
    web.key("n")
    assert named(details(web), "rank 1", "recv ← 0")
    web.key("c")
    web.settled()
    assert web.script("document.getElementById('path').ariaPressed") == "true"


def test_the_address_says_what_to_show(web: Browser, tmp_path: Path) -> None:
    done = run(ring, 4, 1000, net=NET)
    shown(web, tmp_path, done, "clock=steps&zoom=0.25,0.5&ranks=1-2&select=c3&path=1")
    full = web.script("fullTime()")
    assert web.script("[view.clock, view.from, view.to, view.first, view.last]") == [
        "steps", full / 4, full / 2, 1, 2,
    ]  # fmt: skip
    assert named(details(web), "rank 0", "isend → 1")
    web.script("location.hash = '#clock=seconds&zoom=0,1&ranks=0-3'")
    web.until("view.clock === 'seconds' && view.first === 0")
    assert look(web) == (0, pytest.approx(done.seconds * 1e12))


def test_two_runs_stand_beside_each_other_on_one_scale(
    web: Browser, tmp_path: Path
) -> None:
    mine, other = (run(program, 4, 1000, net=NET) for program in (star, ring))
    shown(web, tmp_path, mine, beside=other)
    assert web.complaints() == []
    heads = web.script(
        "[...document.querySelectorAll('.panel h2')].map(h => h.innerText)"
    )
    assert len(set(heads)) == 2
    longest = max(mine.seconds, other.seconds) * 1e12
    assert look(web) == (0, pytest.approx(longest))
    assert web.script("panels[0].frame.x(1e6) === panels[1].frame.x(1e6)")


def test_very_many_ranks_are_a_heat_map_until_one_looks_closer(
    web: Browser, tmp_path: Path
) -> None:
    shown(web, tmp_path, run(ring, 130, 8, net=NET, journal=False))
    assert web.requests() == web.complaints() == []
    state = "document.documentElement.dataset"
    assert web.script(f"{state}.mode") == "overview"
    assert color_at(web, "[f.x(view.to / 2), f.y(50)]") == "move"
    web.click(*spot(web, "[f.x(view.to / 2), f.y(50)]"))
    assert named(details(web), "rank 50", "100 %")
    web.script("document.querySelector('#details button').click()")
    web.settled()
    assert web.script(f"[{state}.mode, {state}.first, {state}.last]") == [
        "lanes", "32", "63",
    ]  # fmt: skip
    web.click(*spot(web, "[f.x(view.to / 2), f.y(50) - f.bar / 4]"))
    assert named(details(web), "rank 50", "rank 51")


def test_a_name_full_of_markup_stays_a_name(web: Browser, tmp_path: Path) -> None:
    shown(web, tmp_path, stuck_ring(2, file=HOSTILE), "select=c0", title=HOSTILE)
    assert web.script("document.title") == HOSTILE
    assert web.script("document.querySelectorAll('b').length") == 1  # of the details
    assert HOSTILE in details(web)
    assert web.complaints() == []


class _Counter(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_what_is_smuggled_in_is_seen_and_the_policy_stops_it(
    web: Browser, tmp_path: Path
) -> None:
    asked: list[str] = []
    handler = type("Handler", (_Counter,), {"asked": asked})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/x.png"
    text = page(run_of([event("enter", 1, "barrier")])).replace(
        "</h1>", f'</h1><img src="{address}">'
    )
    open_to_all = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    file = tmp_path / "smuggled.html"
    try:
        for content, reached in ((open_to_all, ["/x.png"]), (text, [])):
            asked.clear()
            file.write_text(content)
            web.open(file)
            web.settled()
            assert asked == reached
            assert address in web.requests() or web.complaints()
    finally:
        server.shutdown()
        server.server_close()
