"""Tell what a watch has found: as lines, and as a JSON file for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distlab.flight.hang import Hang, find_hang
from distlab.flight.live import Finding, Post, Quiet, records_of
from distlab.flight.page import Line, as_json, page, table
from distlab.flight.records import Records
from distlab.flight.watch import Told
from distlab.runner.autopsy import place
from distlab.runner.record import Outcome
from distlab.terminal import ranks_in_words

PREFIX = "[distlab]"
_STATUS = "no-progress"
_RECORDER = str(Path(__file__).parents[1] / "recorder")


def tell_on_stderr(report: str | Path | None, *, with_stacks: bool = False) -> Told:
    """Return a function that prints a finding, and writes it to `report` as JSON."""

    def tell(found: Finding | Quiet) -> None:
        lines = lines_of(found)
        if with_stacks:
            lines += stacks_of(found.posts)
        text = "\n".join(f"{PREFIX} {line}".rstrip() for _, line in lines)
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        if report:
            write_report(report, found)

    return tell


def lines_of(found: Finding | Quiet) -> list[Line]:
    """One sentence, a table of the ranks, and what to look at first."""
    if isinstance(found, Quiet):
        return _of_quiet(found)
    lines = page(found.records, found.hang)
    style, sentence = lines[0]
    return [(style, f"{found.status}: {sentence}"), *lines[1:]]


def stacks_of(posts: Mapping[int, Post]) -> list[Line]:
    """The Python stack of every thread that could make a call, innermost first."""
    lines: list[Line] = []
    for rank, post in sorted(posts.items()):
        for thread in post["threads"]:
            name = "main thread" if thread["main"] else "a thread"
            lines += [("plain", ""), ("plain", f"rank {rank}, {name}:")]
            lines += [
                ("dim", f"  {place((file, line))} in {function}")
                for file, line, function in thread["stack"]
                if not file.startswith(_RECORDER)
            ]
    return lines


def report_of(found: Finding | Quiet) -> dict[str, Any]:
    """The same for programs."""
    if isinstance(found, Quiet):
        return {
            "status": _STATUS,
            "sentence": _quiet_sentence(found),
            "world_size": found.world_size,
            "ranks_named": _outside(found),
            "since_progress_s": round(found.seconds, 3),
            "ranks": [row_of(rank, found.posts) for rank in range(found.world_size)],
        }
    told = as_json(found.records, found.hang)
    since_s = time.time() - max(post["moved_at_s"] for post in found.posts.values())
    ranks = [_flat(row) for row in told.pop("ranks")]
    return {
        "status": found.status,
        **told,
        "ranks_named": found.ranks,
        "since_progress_s": round(since_s, 3),
        "ranks": ranks,
    }


def write_report(path: str | Path, found: Finding | Quiet) -> None:
    """Write the report to a file; say so on stderr if that's impossible.

    It's JSON, or a page with a timeline if the file's name ends in `.html`.
    """
    try:
        if str(path).endswith(".html"):
            from distlab.flight.drawn import draw

            draw(path, *_drawn(found))
        else:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(report_of(found), file, indent=2)
                file.write("\n")
    except OSError as error:
        print(f"{PREFIX} {path} can't be written: {error.strerror}", file=sys.stderr)
    else:
        print(f"{PREFIX} wrote {path}", file=sys.stderr)


def _drawn(found: Finding | Quiet) -> tuple[Records, str, Outcome]:
    """The calls of all ranks, what is wrong, and how it counts."""
    if isinstance(found, Quiet):
        records = records_of(found.posts, found.world_size)
        return records, _quiet_sentence(found), "timeout"
    return found.records, found.hang.sentence, "deadlock"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    call = row["call"] or {}
    keys = ("operation", "group", "number", "shape", "dtype", "file", "line")
    return {
        "rank": row["rank"],
        "state": row["state"],
        **{("call" if key == "operation" else key): call.get(key) for key in keys},
    }


# ── without a verdict ───────────────────────────────────────────────────────────────


def _quiet_sentence(quiet: Quiet) -> str:
    seconds = f"{quiet.seconds:.0f} s"
    text = f"no rank has made a call for {seconds}. This doesn't prove a hang"
    hang = _disagreement(quiet)
    if hang is not None:
        return f"{text}, but the ranks' records disagree: {hang.sentence}"
    return f"{text}, but here is where each rank is"


def _disagreement(quiet: Quiet) -> Hang | None:
    """What the calls under way differ in, although their ranks may still move."""
    records = records_of(quiet.posts, quiet.world_size)
    if len(records.dumps) < quiet.world_size:
        return None
    hang = find_hang(records)
    return hang if hang.kind in ("mismatch", "absent", "circle") else None


def _of_quiet(quiet: Quiet) -> list[Line]:
    head = f"{_STATUS}: {_quiet_sentence(quiet)}"
    return [("fail", head), ("plain", ""), *where_all_are(quiet)]


def where_all_are(quiet: Quiet) -> list[Line]:
    """A table of the ranks, and at which of them to look first."""
    rows = [
        (str(row["rank"]), row["state"], row["call"] or "", where_in(row))
        for row in (row_of(rank, quiet.posts) for rank in range(quiet.world_size))
    ]
    lines = table([("rank", "state", "in", "where"), *rows])
    outside = _outside(quiet)
    if outside:
        first = f"Look at {ranks_in_words(outside)} first"
        lines += [
            ("plain", ""),
            ("dim", f"{first}, because the others are waiting in a call."),
        ]
    return lines


def _outside(quiet: Quiet) -> list[int]:
    """The ranks that don't wait in a call, if others do."""
    posts, ranks = quiet.posts, range(quiet.world_size)
    found = [r for r in ranks if r not in posts or posts[r]["state"] != "still"]
    return found if len(found) < quiet.world_size else []


def where_in(row: Mapping[str, Any]) -> str:
    """`train.py:20`, or nothing."""
    return place((row["file"], row["line"])) if row["file"] else ""


def row_of(rank: int, posts: Mapping[int, Post]) -> dict[str, Any]:
    """A row for a rank of which nothing is proved."""
    row: dict[str, Any] = dict.fromkeys(
        ("call", "group", "number", "shape", "dtype", "file", "line")
    )
    post = posts.get(rank)
    if post is None:
        return {"rank": rank, "state": "no post", **row}
    main = min(post["threads"], key=lambda thread: not thread["main"], default=None)
    state = {"ended": "has ended", "failed": "has failed"}.get(post["state"], "")
    if main is None:
        return {"rank": rank, "state": state or "no thread", **row}
    is_beating = post["state"] == "moves"
    if is_beating and time.time() - post["posted_at_s"] > 3 * post["beat_s"]:
        state = "not answering"  # it holds the GIL, or was stopped
    act, where = main["act"], main["place"]
    if not state:
        state = "waiting" if act else "asleep" if main["sleeps"] else "computing"
    call = act["op"] if act else main["stack"][0][2] if main["stack"] else None
    file, line = where or (None, None)
    return {
        "rank": rank,
        "state": state,
        **row,
        "call": call,
        "file": file,
        "line": line,
    }
