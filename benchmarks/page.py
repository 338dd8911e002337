"""How large the page about a run is, and how long a browser takes to draw it.

A ring all-reduce is simulated on 4, 64 and 1,024 ranks (the last one without journals:
it has two million messages), its page is written, and a headless Chromium opens it and
zooms in once. `ready` is from the navigation to the first picture, `draw` and `zoom`
the drawing alone; both are the page's own performance.now, the median of a few times.

    distlab bench page [--json]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks._bars import Bench, Line
from benchmarks._sim_runs import ring
from distlab.sim import run
from distlab.trace import to_html
from tests.browser import PROGRAM, Browser, browser

WORLDS = (4, 64, 1024)
TIMES = 5
BENCH = Bench("page", __doc__, at_most={"ready_ms_n64": 2000.0})
_DATA = "document.documentElement.dataset"


def figures(web: Browser, world_size: int, folder: Path) -> list[Line]:
    """One page: written once, opened `TIMES` times."""
    data = torch.zeros(16 * world_size)
    done = run(ring, world_size, data, journal=world_size <= 64)
    path = folder / f"{world_size}.html"
    started = time.process_time()
    to_html(done, path, title=f"Ring all-reduce, {world_size} ranks")
    write_s = time.process_time() - started
    ready, draw, zoom = [], [], []
    for _ in range(TIMES):
        web.open(path)
        ready.append(float(web.until(f"{_DATA}.readyMs")))
        draw.append(float(web.script(f"{_DATA}.drawMs")))
        web.script("zoom(0.5)")
        web.settled()
        zoom.append(float(web.script(f"{_DATA}.drawMs")))
    found = {
        "messages": (len(done.trace), ""),
        "page_kb": (path.stat().st_size / 1e3, "kB"),
        "write_s": (round(write_s, 2), "CPU s"),
        "ready_ms": (statistics.median(ready), "ms"),
        "draw_ms": (statistics.median(draw), "ms"),
        "zoom_ms": (statistics.median(zoom), "ms"),
    }
    return [BENCH.line(f"{k}_n{world_size}", v, unit) for k, (v, unit) in found.items()]


def measure() -> list[Line]:
    """All figures.

    Raises:
        SystemExit: there is no browser.
    """
    if PROGRAM is None:
        raise SystemExit("bench page: chromium is not installed here")
    with tempfile.TemporaryDirectory() as folder, browser() as web:
        web.resize(1300, 900)
        return [line for n in WORLDS for line in figures(web, n, Path(folder))]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure))
