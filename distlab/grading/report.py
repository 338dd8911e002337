"""A verdict on the terminal: sentence, evidence by rank, rule, where."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from distlab.grading.verdict import HALF_DONE, ClauseVerdict, TaskVerdict
from distlab.terminal import ranks_in_words, screen_width

if TYPE_CHECKING:
    from distlab.runner.autopsy import Evidence

_INDENT = "  "
_EVIDENCE_ROWS = 8
_PATH = re.compile(r"(?<!\S)/(?:[^\s/:]+/)+(?=[^\s/:]+\.py:)")
_TRANSPORT = re.compile(r"throwing an instance of 'gloo::|what\(\):  \[enforce fail")


def lines_of(verdict: TaskVerdict) -> list[tuple[str, str]]:
    """The verdict as (style, line) pairs; styles are pass, fail, dim, plain, rule."""
    return [(style, visible(line)) for style, line in _lines(verdict)]


def visible(text: str) -> str:
    """`text` with what would move the cursor or color the screen spelled out."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def _lines(verdict: TaskVerdict) -> list[tuple[str, str]]:
    if verdict.status == "pass":
        return _passed(verdict)
    if verdict.status == "not_started":
        return [
            ("dim", f"{verdict.number} {_state_of(verdict)}"),
            ("plain", f"{_INDENT}{verdict.place}"),
        ]
    if verdict.status == "not_judged":
        lines = _wrap(f"{verdict.number} NOT JUDGED  {verdict.message}")
        return [("dim", line) for line in lines]
    if verdict.status == "error":
        head = f"{verdict.number} HARNESS ERROR, not your fault: {verdict.message}"
        return [("fail", line) for line in _wrap(head)]
    return _failed(verdict)


def _state_of(verdict: TaskVerdict) -> str:
    half = verdict.message.startswith(HALF_DONE)
    return verdict.message if half else f"not started   {verdict.title}"


def one_line(verdict: TaskVerdict) -> str:
    """The verdict in one sentence, for a list of tasks or a test report."""
    return visible(_one_line(verdict))


def _one_line(verdict: TaskVerdict) -> str:
    head = f"{verdict.number} {verdict.id}"
    if verdict.status == "pass":
        return f"{head} PASS"
    if verdict.status == "not_started":
        half = verdict.message.startswith(HALF_DONE)
        state = verdict.message if half else "not started"
        return f"{head} {state}: {verdict.place}"
    if verdict.status == "not_judged":
        return f"{head} {verdict.message}"
    failure = verdict.first_failure()
    clause = f" {failure.id}" if failure and failure.kind else ""
    kind = (failure.kind if failure else "") or "NOT YET"
    if verdict.status == "error":
        kind = "HARNESS ERROR"
    slug = f" [{verdict.slug}]" if verdict.slug else ""
    return f"{head}{clause} {kind}: {verdict.message}{slug}"


def _passed(verdict: TaskVerdict) -> list[tuple[str, str]]:
    sizes = ", ".join(map(str, verdict.world_sizes))
    # A plan is worked out for many sizes by one process: its note says for which.
    head = f"{verdict.number} PASS" + ("" if verdict.is_plan else f"  n = {sizes}")
    lines = [("pass", _spread(head, f"{verdict.seconds:.2f} s"))]
    notes = [clause.note for clause in verdict.clauses if clause.note]
    if verdict.printed:
        notes.append("(something was printed meanwhile: shown when a check fails)")
    return lines + [("dim", line) for note in notes for line in _wrap(note, _INDENT)]


def _failed(verdict: TaskVerdict) -> list[tuple[str, str]]:
    failure = verdict.first_failure()
    # Without a kind nothing ran: the file itself is the matter.
    if failure is None or not failure.kind:
        head = f"{verdict.number} NOT YET  {verdict.message}"
        advice = failure.rule if failure else ""
        return [
            *_headline(head, verdict.slug),
            ("plain", f"{_INDENT}{verdict.place}"),
            *_rule(advice),
        ]
    head = f"{verdict.number} {failure.id} {failure.kind}  {failure.message}"
    lines = _headline(head, failure.slug)
    rows = failure.evidence
    if verdict.is_plan:  # one process plays all ranks: the headline says for which
        rows = tuple(row for row in rows if not row.where)
    lines += [("plain", line) for line in evidence_lines(rows)]
    lines += _rule(failure.rule)
    lines += _printed(failure, verdict.is_plan)
    others = [c for c in verdict.clauses if c is not failure]
    tail = "   ".join(f"{clause.id} {_word(clause)}" for clause in others)
    has_size = failure.world_size and not verdict.is_plan
    size = f"n = {failure.world_size}   " if has_size else ""
    tail = f"{_INDENT}{size}{tail}"
    seconds = f"{verdict.seconds:.2f} s"
    where = _guilty_line(failure.evidence)
    if where and len(tail) + len(where) + len(seconds) + 5 <= screen_width():
        tail += f"   {where}"
    elif where:
        lines.append(("plain", _INDENT + where))
    lines.append(("dim", _spread(tail.rstrip(), seconds)))
    return lines


def _guilty_line(evidence: tuple[Evidence, ...]) -> str:
    """Where to look first: at the rank that failed, before those that wait for it."""
    for states in (("refused", "raised", "died"), ("busy",), ("waiting",)):
        for row in evidence:
            if row.where and row.state in states:
                return row.where.partition(" ")[0]
    return next((row.where.partition(" ")[0] for row in evidence if row.where), "")


def _rule(text: str) -> list[tuple[str, str]]:
    return [("rule", line) for line in _wrap(f"→ {text}", _INDENT)] if text else []


def _headline(head: str, slug: str) -> list[tuple[str, str]]:
    tag = f"[{slug}]" if slug else ""
    lines = _wrap(head)
    if tag and len(lines[-1]) + len(tag) + 2 <= screen_width():
        lines[-1] = _spread(lines[-1], tag)
    elif tag:
        lines.append(tag.rjust(screen_width()))
    return [("fail", line) for line in lines]


def evidence_lines(evidence: tuple[Evidence, ...]) -> list[str]:
    """A row for each rank, or for three and more neighbors that did the same."""
    if not evidence:
        return []
    groups = _alike(replace(row, text=visible(row.text)) for row in evidence)
    shown = groups[:_EVIDENCE_ROWS]
    who = max(len(name) for name, _, _ in shown)
    state = max(len(row.state) for _, _, row in shown)
    text = max(len(row.text) for _, _, row in shown)
    lines = []
    for name, _, row in shown:
        where = row.where.rpartition("/")[2]  # the folder stands in the last line
        head = f"{_INDENT}{name:<{who}}  " if who else _INDENT
        head += f"{row.state:<{state}}  "
        side_by_side = len(head) + 2 + len(where)
        if side_by_side + text <= screen_width():
            lines.append(f"{head}{row.text:<{text}}  {where}".rstrip())
        elif side_by_side + len(row.text) <= screen_width():
            lines.append(f"{head}{row.text}  {where}".rstrip())
        else:
            lines += _wrap(row.text, head, len(head))
            if where:
                lines.append(" " * len(head) + where)
    left = groups[_EVIDENCE_ROWS:]
    if num := sum(count for _, count, _ in left):
        kind = "rank" if all(row.rank >= 0 for _, _, row in left) else "row"
        lines.append(f"{_INDENT}… and {num} {kind}{'s' * (num > 1)} more")
    return lines


def _alike(evidence: Iterable[Evidence]) -> list[tuple[str, int, Evidence]]:
    """Three or more neighbors that did the same, as one: name, how many, what."""
    groups: list[tuple[str, int, Evidence]] = []
    for _, rows in groupby(evidence, lambda row: (row.state, row.text, row.where)):
        same = list(rows)
        if same[0].rank < 0:
            groups += [("", 1, row) for row in same]
        elif len(same) > 2:
            groups.append(
                (ranks_in_words([row.rank for row in same]), len(same), same[0])
            )
        else:
            groups += [(f"rank {row.rank}", 1, row) for row in same]
    return groups


def _printed(failure: ClauseVerdict, is_plan: bool) -> list[tuple[str, str]]:
    # What the transport says when it gives up is not the learner's, and no help.
    printed = [
        line for line in failure.output.splitlines() if not _TRANSPORT.search(line)
    ]
    if not printed:
        return []
    if is_plan:
        printed = [line.removeprefix("[rank 0] ") for line in printed]
    lines = [("dim", f"{_INDENT}printed meanwhile:")]
    lines += [("dim", row) for line in printed[:6] for row in _printed_rows(line)]
    if len(printed) > 6:
        lines.append(("dim", f"{_INDENT}  … {len(printed) - 6} lines more"))
    return lines


def _printed_rows(line: str) -> list[str]:
    """A line that the learner's code printed: two rows of it at most.

    Python's warnings begin with a long path: of that the file's name is enough.
    """
    line = _PATH.sub("", visible(line.expandtabs(4)))
    rows = textwrap.wrap(
        line,
        screen_width(),
        initial_indent=_INDENT * 2,
        subsequent_indent=_INDENT * 3,
        drop_whitespace=False,
        max_lines=2,
        placeholder=" …",
    )
    return rows or [""]


def _word(clause: ClauseVerdict) -> str:
    words = {"pass": "passes", "fail": "fails too", "skip": "not judged"}
    return words[clause.status]


def _wrap(text: str, first: str = "", hanging: int | None = None) -> list[str]:
    indent = " " * (len(first) + 2 if hanging is None else hanging)
    if hanging is None and not first:
        indent = "    "
    wrapped = textwrap.wrap(
        visible(text.replace("\n", " ")),
        screen_width(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [first.rstrip()]


def _spread(left: str, right: str) -> str:
    return f"{left}{right.rjust(max(len(right) + 2, screen_width() - len(left)))}"


def plain(lines: Iterable[tuple[str, str]]) -> str:
    """The lines without their styles."""
    return "\n".join(line for _, line in lines)
