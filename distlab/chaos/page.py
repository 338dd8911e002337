"""Show the results as one HTML file that needs no other file and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from distlab.chaos.campaign import Campaign
from distlab.chaos.judge import RECOVERED, CellResult
from distlab.chaos.matrix import MODES, MOMENTS, Cell
from distlab.chaos.plan import Setting
from distlab.chaos.report import by_id, reasons, rows_of, summary, text_of, times
from distlab.trace import palette

_STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {palette.INK};
  background: {palette.PAPER}; margin: 2em auto; max-width: 72em; padding: 0 1em }}
table {{ border-collapse: collapse; background: {palette.SURFACE}; margin: 1em 0 }}
th, td {{ border: 1px solid {palette.GRID}; padding: .35em .7em; text-align: left;
  vertical-align: top }}
td.good {{ border-left: 4px solid {palette.COMPLETE} }}
td.bad {{ border-left: 4px solid {palette.FAILURE}; font-weight: bold }}
td.none {{ color: {palette.MUTED} }}
pre {{ overflow-x: auto; background: {palette.SURFACE}; padding: .5em }}
.note {{ color: {palette.MUTED} }}
"""


def page(results: Sequence[CellResult], campaign: Campaign, setting: Setting) -> str:
    """Return the page as text."""
    parts = [f"<p>{escape(summary(results))}.</p>"]
    for mode in MODES:
        if any(result.cell.mode == mode for result in results):
            parts += [
                f"<h2>Mode {mode}</h2>",
                _table(mode, results),
                _times(mode, results),
            ]
    parts.append(_defects(results))
    if told := reasons(campaign):
        items = "".join(f"<li>{escape(line)}</li>" for line in told)
        parts.append(f"<h2>What is not in the tables</h2><ul>{items}</ul>")
    parts.append(_details(results))
    title = "Faults in a real training run"
    setup = (
        f"{setting.num_ranks} ranks, {setting.num_steps} steps on the digits, a "
        f"checkpoint every {setting.save_every} steps, seed {setting.seed}. "
        "Each time runs from the fault to every rank's next step. At the end, the "
        "weights must be bit-for-bit the same as in an unbroken run, and every sample "
        "of an epoch must have been used once."
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="note">{escape(setup)}</p>
{"".join(parts)}
</body>
</html>
"""


def _table(mode: str, results: Sequence[CellResult]) -> str:
    found = by_id(results)
    heads = "".join(f"<th>{escape(title)}</th>" for title in MOMENTS.values())
    rows = []
    for fault in rows_of(mode, [result.cell for result in results]):
        fields = (_field(Cell(fault, moment, mode), found) for moment in MOMENTS)
        rows.append(f"<tr><th>{escape(fault.title)}</th>{''.join(fields)}</tr>")
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _field(cell: Cell, found: dict[str, CellResult]) -> str:
    result, text = found.get(cell.id), escape(text_of(cell, found))
    if result is None:
        title = cell.why_not or "not played"
        return f'<td class="none" title="{escape(title)}">{text}</td>'
    title = "; ".join(filter(None, (result.what, result.why)))
    kind = "good" if result.is_good else "bad"
    shown = text if result.is_good else escape(f"✗ {result.status}")
    return f'<td class="{kind}" title="{escape(title)}">{shown}</td>'


def _times(mode: str, results: Sequence[CellResult]) -> str:
    lines = times([result for result in results if result.cell.mode == mode])
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _defects(results: Sequence[CellResult]) -> str:
    parts = []
    for result in results:
        if not result.is_good:
            head = f"{result.cell.id}: {result.status}. {result.why}. {result.what}"
            text = "\n".join(result.evidence)
            parts.append(f"<h3>{escape(head)}</h3><pre>{escape(text)}</pre>")
    return f"<h2>Defects</h2>{''.join(parts)}" if parts else ""


def _details(results: Sequence[CellResult]) -> str:
    rows = []
    for result in results:
        segments = ", ".join(f"{name} {s:.2f} s" for name, s in result.segments.items())
        texts = result.cell.id, result.status, result.what, result.why or segments
        fields = "".join(f"<td>{escape(text)}</td>" for text in texts)
        again = result.num_lost if result.status == RECOVERED else ""
        rows.append(f"<tr>{fields}<td>{again}</td></tr>")
    heads = ("cell", "result", "what happened", "how it went on", "steps done again")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<h2>Each cell</h2><table><tr>{head}</tr>{''.join(rows)}</table>"
