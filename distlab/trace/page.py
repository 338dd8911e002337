"""One HTML file about a run: no script, no network, nothing beside it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from distlab.runner.autopsy import evidence, explain
from distlab.trace.canvas import BLUE, GREEN, GREY, ORANGE, RED, SANS, SKY
from distlab.trace.timeline import draw_timeline, words_of

if TYPE_CHECKING:
    from distlab.runner import RankRecord, Run

_CALLS = 40  # of each rank that the list in words holds: the last ones
_STYLE = f"""
body {{ font-family: {SANS}; margin: 1.5rem; color: #222; background: #fff;
       max-width: 72rem; line-height: 1.4 }}
h1 {{ font-size: 1.2rem }} h2 {{ font-size: 1rem; margin-top: 1.5rem }}
figure {{ margin: 0; overflow-x: auto }}
.key span {{ display: inline-block; margin-right: 1.2rem; white-space: nowrap }}
.key i {{ display: inline-block; width: 1.6em; height: .8em; margin-right: .4em;
        border: 1px solid {BLUE} }}
table {{ border-collapse: collapse }} td, th {{ text-align: left; padding: .15rem .8rem
       .15rem 0; font-family: monospace; vertical-align: top }}
details {{ margin: .3rem 0 }} li {{ font-family: monospace }}
"""
_KEY = (
    (f"background:{SKY}", "a call that was done"),
    (f"background:{GREEN};border-color:{GREEN}", "a message (arrow)"),
    (
        f"background:repeating-linear-gradient(135deg,#fff 0 4px,{RED} 4px 6px);"
        f"border-color:{RED}",
        "waits, for ever",
    ),
    (
        f"background:repeating-linear-gradient(135deg,#fff 0 4px,{GREY} 4px 6px);"
        f"border-color:{GREY}",
        "waited for the other side",
    ),
    (f"background:{RED};border-color:{RED}", "what it waits for (arrow)"),
    (f"background:{ORANGE}", "a call that failed or was refused"),
)


def page(run: Run, *, title: str = "", verdict: str = "") -> str:
    """The run as a page: its sentence, lanes, and every rank's calls in words.

    `title` says which task it was, `verdict` what the grader had to say.
    """
    head = title or "A run, as a timeline"
    sentence = verdict or explain(run)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(head)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(head)}</h1>
<p>{escape(sentence)}</p>
<figure>
{draw_timeline(run)}</figure>
<p class="key">{_key()}</p>
<p>From left to right: what happened before what. Not seconds: every call takes one
step, and a message happens once both its sides are there. Point at a bar or an arrow
to see its line.</p>
<h2>Where each rank is</h2>
{_table(run)}
<h2>The calls in words</h2>
{"".join(_calls(record) for record in run.ranks)}
</body>
</html>
"""


def _key() -> str:
    return "".join(
        f'<span><i style="{style}"></i>{words}</span>' for style, words in _KEY
    )


def _table(run: Run) -> str:
    rows = "".join(
        f"<tr><td>rank {row.rank}</td><td>{escape(row.state)}</td>"
        f"<td>{escape(row.text)}</td><td>{escape(row.where)}</td></tr>\n"
        for row in evidence(run)
    )
    head = "<tr><th>rank</th><th>state</th><th>in</th><th>line</th></tr>"
    return f"<table>\n{head}\n{rows}</table>"


def _calls(record: RankRecord) -> str:
    calls = record.calls()
    still = {call["n"] for call in record.open_calls()}
    earlier = len(calls) - _CALLS
    items = [f"<li>… {earlier} earlier ones</li>"] if earlier > 0 else []
    for call in calls[-_CALLS:]:
        mark = "   (not done)" if call["n"] in still else ""
        items.append(f"<li>{escape(words_of(call) + mark)}</li>")
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    inner = f"<ul>{''.join(items)}</ul>" if calls else ""
    return f"<details><summary>rank {record.rank}: {count}</summary>{inner}</details>\n"
