"""A run in words, for the page: its figures, where each rank is, and all its calls."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from distlab.runner.autopsy import evidence
from distlab.sim.net.quantities import time_words
from distlab.trace.critical_path import Segment, seconds_by_kind
from distlab.trace.links import links_of
from distlab.trace.model import Trace
from distlab.trace.timeline import words_of

if TYPE_CHECKING:
    from distlab.runner import RankRecord, Run

_CALLS = 400  # of all ranks: the last ones of each
_RANKS = 64  # the first ones
_LINKS = 4


def figures(trace: Trace, path: Sequence[Segment], name: str) -> str:
    """What can be counted, as a paragraph."""
    m, links = trace.messages, links_of(trace)
    sent, ranks = int(m["num_bytes"].sum()), trace.world_size
    lines = [
        f"{ranks} rank{'s' * (ranks > 1)}, {len(m):,} messages, {sent:,} bytes in all."
    ]
    if len(m):
        busiest = sorted(links, key=lambda link: -link.mean)[:_LINKS]
        named = ", ".join(f"{link.name} {link.mean:.0%}" for link in busiest)
        # Only a simulated network knows when bytes pass; else the latency counts too.
        what = "links, by the time in which bytes pass there"
        if not trace.links:
            what = "links of ranks, as a fraction of the time"
        lines.append(f"The busiest {what}: {named}.")
    if lost := int(m["lost"].sum()):
        lines.append(f"{lost:,} of the messages never arrived.")
    spent = seconds_by_kind(path)
    whole = sum(spent.values())
    if trace.outcome == "finished":
        took = time_words(trace.end_ps / 1e12)
        lines[0] = f"{lines[0][:-1]}. This run took {took}."
    if whole:
        words = {
            "message": "messages under way",
            "queue": "messages that queue for a link",
            "call": "calls",
            "work": "the ranks' own work",
        }
        parts = [f"{words[k]} {s / whole:.0%}" for k, s in spent.items()]
        lines.append(f"On the critical path: {', '.join(parts)}.")
    head = f"<b>{escape(name)}</b>: " if name else ""
    return f"<p>{head}{escape(' '.join(lines))}</p>\n"


def table_of(run: Run) -> str:
    """One row per rank; neighbors that are in the same state share one."""
    lines = evidence(run)[:_RANKS]
    groups = groupby(lines, lambda row: (row.state, row.text, row.where))
    rows = "".join(
        f"<tr><td>{_ranks([row.rank for row in same])}</td><td>{escape(state)}</td>"
        f"<td>{escape(text)}</td><td>{escape(where)}</td></tr>\n"
        for (state, text, where), same in groups
    )
    head = "<tr><th>rank</th><th>state</th><th>in</th><th>line</th></tr>"
    return f"<table>\n{head}\n{rows}</table>{_and_more(run.world_size)}"


def _ranks(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _and_more(count: int) -> str:
    return f"<p>… and {count - _RANKS} ranks more</p>" if count > _RANKS else ""


def lists_of(run: Run) -> str:
    """The calls of each rank, to be folded out."""
    records = run.ranks[:_RANKS]
    share = max(3, _CALLS // len(records))
    return "".join(_calls(record, share) for record in records) + _and_more(
        run.world_size
    )


def _calls(record: RankRecord, most: int) -> str:
    calls = record.calls()
    still = {call["n"] for call in record.open_calls()}
    earlier = len(calls) - most
    items = [f"<li>… {earlier} earlier ones</li>"] if earlier > 0 else []
    for call in calls[-most:]:
        mark = "   (not done)" if call["n"] in still else ""
        items.append(f'<li class="call">{escape(words_of(call) + mark)}</li>')
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    inner = f"<ul>{''.join(items)}</ul>" if calls else ""
    return f"<details><summary>rank {record.rank}: {count}</summary>{inner}</details>\n"
