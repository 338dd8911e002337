"""How large the page about a run is, and how long a browser takes to draw it.

A ring all-reduce is simulated on 4, 64 and 1,024 ranks (the last one without journals:
it has two million messages), its page is written, and a headless Chromium opens it and
zooms in once. `ready` is from the navigation to the first picture, `draw` and `zoom`
the drawing alone; both are the page's own performance.now, the median of a few times.

    distlab bench page [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks._browser import PROGRAM, Browser, browser  # noqa: E402
from distlab.runner import RankContext  # noqa: E402
from distlab.sim import run  # noqa: E402
from distlab.trace import to_html  # noqa: E402

WORLDS = (4, 64, 1024)
TIMES = 5
BAR_READY_MS = 2000.0  # at 64 ranks
_DATA = "document.documentElement.dataset"


def ring(context: RankContext, size: int) -> None:
    """Pass `size` numbers all the way round, twice: a ring all-reduce's messages."""
    comm, n = context.comm, context.world_size
    received = torch.zeros(size)
    for _ in range(2 * (n - 1)):
        sending = comm.isend(torch.ones(size), (comm.rank + 1) % n)
        comm.recv(received, (comm.rank - 1) % n)
        sending.wait()


def measure(web: Browser, world_size: int, folder: Path) -> dict[str, Any]:
    """One page: written once, opened `TIMES` times."""
    done = run(ring, world_size, 16, journal=world_size <= 64)
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
    return {
        "ranks": world_size,
        "messages": len(done.trace),
        "bytes": path.stat().st_size,
        "write_cpu_s": round(write_s, 2),
        "ready_ms": statistics.median(ready),
        "draw_ms": statistics.median(draw),
        "zoom_ms": statistics.median(zoom),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The figures as a table."""
    print("  ranks   messages   page kB   written s   ready ms   draw ms   zoom ms")
    for row in rows:
        print(
            f"{row['ranks']:7,} {row['messages']:10,} {row['bytes'] / 1e3:9.0f} "
            f"{row['write_cpu_s']:11.2f} {row['ready_ms']:10.0f} "
            f"{row['draw_ms']:9.1f} {row['zoom_ms']:9.1f}"
        )


def main() -> int:
    """Print the figures; 1 if a page of 64 ranks is not drawn in two seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args().json
    if PROGRAM is None:
        print("bench page: chromium is not installed here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, browser() as web:
        web.resize(1300, 900)
        rows = [measure(web, n, Path(folder)) for n in WORLDS]
    ready = next(row["ready_ms"] for row in rows if row["ranks"] == 64)
    if as_json:
        print(json.dumps({"rows": rows, "bar_ready_ms": BAR_READY_MS}, indent=1))
    else:
        show(rows)
    return 0 if ready < BAR_READY_MS else 1


if __name__ == "__main__":
    sys.exit(main())
