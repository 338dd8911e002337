"""One HTML file about a run: nothing beside it, and no network, ever.

The picture is drawn by the page's own script (page*.js, inlined). Everything it shows
is there in words as well, for who cannot see it or whose browser runs no script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distlab.trace.critical_path import path_of
from distlab.trace.journals import trace_of
from distlab.trace.model import STATES, Site, Trace
from distlab.trace.packed import pack
from distlab.trace.story import story
from distlab.trace.summary import figures, lists_of, table_of

if TYPE_CHECKING:
    from distlab.runner import Run

_SCRIPTS = ("data", "lanes", "arrows", "overview", "words")
_LINES = 4  # of code, beside the story
_FEW = 4  # ranks that are named one by one
_KEY = {
    "move": "a call that moves data",
    "wait": "a call that waits for the other side",
    "": "the rank's own work",
    "post": "a call that returns at once (isend, irecv)",
    "half": "sends (above), receives (below)",
    "message": "message",
    "path": "critical path",
    "stuck": "waits forever",
    "never": "message that is never delivered",
    "failed": "failed or refused",
}
_HINT = (
    "wheel: zoom · drag: move · click: what it is · keys: ← → + − 0, "
    "n p ↑ ↓ from call to call, c critical path"
)


def to_html(
    run: Run,
    path: Path | str,
    beside: Run | None = None,
    *,
    title: str = "",
    verdict: str = "",
    names: tuple[str, str] = ("yours", "the reference"),
) -> None:
    """Write the page about `run` to `path`; with `beside`, both on the same scale.

    Raises:
        OSError: it cannot be written.
    """
    text = page(run, beside, title=title, verdict=verdict, names=names)
    Path(path).write_text(text, encoding="utf-8", errors="replace")


def page(
    run: Run,
    beside: Run | None = None,
    *,
    title: str = "",
    verdict: str = "",
    names: tuple[str, str] = ("yours", "the reference"),
) -> str:
    """The page as text. `title` says which task it was, `verdict` what was judged."""
    head = title or "A run, as a timeline"
    runs = [one for one in (run, beside) if one is not None]
    traces = [trace_of(one) for one in runs]
    paths = [path_of(trace) for trace in traces]
    titles = names if beside is not None else ("",)
    parts = list(zip(traces, runs, paths, titles, strict=False))
    packed = [pack(*part) for part in parts]
    notes = [note for one in packed for note in one["notes"]]
    # What stands still has no times worth showing: what came before what does.
    steps = all(t.num_steps for t in traces) and traces[0].clock == "wall"
    steps = steps or (bool(traces[0].num_steps) and run.outcome == "deadlock")
    data = {"clock": "steps" if steps else "seconds", "traces": packed}
    style, script = _file("page.css"), _script()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<meta name="viewport" content="width=device-width">
<title>{escape(head)}</title>
<style>{style}</style>
</head>
<body class="{"fine" if run.outcome == "finished" else "stuck"}">
<h1>{escape(head)}</h1>
<p class="sentence">{escape(verdict or _sentence(run, traces[0]))}</p>
{_story(run, traces[0])}
{_tools()}
<div id="panels"></div>
<p class="key">{_key(traces, packed)}</p>
<div id="details" class="details" role="status" aria-live="polite"></div>
<p class="note">{escape(_clock(traces[0]))} {escape(" ".join(notes))}</p>
<noscript><p>Without its script this page has no picture; all is in words below.</p>
</noscript>
<h2>In figures</h2>
{"".join(figures(trace, path, name) for trace, _, path, name in parts)}
<h2>Where each rank is</h2>
{table_of(run)}
<h2>The calls in words</h2>
{lists_of(run)}
<script type="application/json" id="trace-data">{_inert(data)}</script>
<script>{script}</script>
</body>
</html>
"""


# ── the file ────────────────────────────────────────────────────────────────────────


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _script() -> str:
    """The page's script; page.js comes last but one, page_words.js starts it."""
    *before, last = _SCRIPTS
    names = [*(f"page_{name}.js" for name in before), "page.js", f"page_{last}.js"]
    return "\n".join(_file(name) for name in names)


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded from anywhere; only this style and this script count."""
    return (
        f"default-src 'none'; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _inert(data: dict[str, Any]) -> str:
    """JSON in which nothing can end the script it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


# ── around the picture ──────────────────────────────────────────────────────────────


def _sentence(run: Run, trace: Trace) -> str:
    if run.outcome == "deadlock" and run.cycle:
        return f"Deadlock: {trace.sentence}"
    return trace.sentence


def _story(run: Run, trace: Trace) -> str:
    lines = story(run)
    if not lines:
        return ""
    told = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    calls = trace.calls
    ranks: dict[int, list[int]] = {}  # by the line in which they wait, as they are told
    place = {rank: number for number, rank in enumerate(run.cycle)}
    stuck = np.flatnonzero(calls["state"] == STATES.index("waiting")).tolist()
    for row in sorted(
        stuck, key=lambda r: place.get(int(calls["rank"][r]), len(place))
    ):
        ranks.setdefault(int(calls["site"][row]), []).append(int(calls["rank"][row]))
    code = "".join(
        f"<p><code>{escape(_line(trace.sites[number], ranks[number]))}</code></p>\n"
        for number in list(ranks)[:_LINES]
        if trace.sites[number].file
    )
    return f"""<section class="story">
<h2>Why no rank can go on</h2>
{told}{code}</section>"""


def _line(site: Site, ranks: list[int]) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    if 1 < len(ranks) <= _FEW:
        who = f"ranks {', '.join(map(str, sorted(ranks)))}"
    return f"{who:<14} {site.file}:{site.line}   {site.text}"


def _tools() -> str:
    def button(name: str, words: str, hint: str, kind: str = "") -> str:
        css = f' class="{kind}"' if kind else ""
        return f'<button id="{name}"{css} title="{hint}">{words}</button>'

    return f"""<div id="tools" class="tools" hidden>
<span class="group">{button("steps", "steps", "what came before what")}
{button("seconds", "time", "when it was")}</span>
<span class="group">{button("closer", "+", "zoom in")}
{button("farther", "−", "zoom out")}
{button("whole", "all", "the whole run, all ranks")}</span>
<span class="group"><label>ranks <input id="ranks" class="ranks" size="9"></label>
{button("up", "▲", "the ranks before")}
{button("down", "▼", "the ranks after")}</span>
{button("path", "critical path", "what made the run take so long", "path")}
<span class="hint">{_HINT}</span> <span class="hint" id="hidden"></span>
</div>"""


def _key(traces: list[Trace], packed: list[dict[str, Any]]) -> str:
    """What the colors mean: of those that are in the picture."""
    shown = set[str]().union(*map(_styles, traces))
    if any(one["path"]["length"] for one in packed):
        shown.add("path")
    if any(one["never"] for one in packed):
        shown.add("never")
    return "".join(
        f'<span><i class="{style}"></i>{words}</span>'
        for style, words in _KEY.items()
        if style in shown
    )


def _styles(trace: Trace) -> set[str]:
    """The kinds of bars and arrows that a trace is drawn with."""
    calls = trace.calls
    states = {STATES[number] for number in np.unique(calls["state"]).tolist()}
    done = calls["state"] == STATES.index("done")
    found = {"": True, "half": not len(calls) and len(trace.messages)}
    found["message"] = bool(len(trace.messages))
    found["move"] = bool(np.any(done & (calls["end_ps"] > calls["ready_ps"])))
    found["wait"] = bool(np.any(done & (calls["ready_ps"] > calls["start_ps"])))
    found["post"] = "posted" in states
    found["stuck"] = "waiting" in states
    found["failed"] = "failed" in states
    return {style for style, is_there in found.items() if is_there}


def _clock(trace: Trace) -> str:
    """What the axis is, and what the strip below the lanes shows."""
    clock = "Times are those of this machine's clock."
    if trace.clock == "virtual":
        clock = "Times are simulated time."
    if not len(trace.messages):
        return clock
    return (
        f"{clock} In steps, each call takes one step, and a message is delivered once "
        "both its calls have begun. Below the lanes, the blue area is the fraction of "
        "all links in use, and the line is the busiest link: a message uses its "
        "sender's outgoing link and its receiver's incoming link until it has arrived."
    )
