"""What `distlab audit` prints: each finding with its line, then the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from distlab.audit.run import AuditReport
from distlab.terminal import WIDTH

Lines = Iterator[tuple[str, str]]


def page(report: AuditReport, folder: Path) -> Lines:
    """Return (style, line) pairs; places are shown relative to `folder`."""
    for finding in report.findings:
        style = "dim" if finding.is_note else "fail"
        yield style, f"{finding.shown_at(folder)}  {finding.name}"
        yield from _wrapped("plain", finding.said)
        if finding.advice:
            yield from _wrapped("dim", f"→ {finding.advice}")
    for note in report.notes:
        yield "dim", f"note: {note}"
    num = sum(not finding.is_note for finding in report.findings)
    if num == 0:
        yield "pass", f"✓ no mistake found on {report.world_size} ranks"
    else:
        count = "1 finding" if num == 1 else f"{num} findings"
        yield "fail", f"✗ {count} on {report.world_size} ranks"


def _wrapped(style: str, text: str) -> Lines:
    for line in textwrap.wrap(
        text,
        WIDTH - 4,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield style, line
