"""Rewrites GitHub's Markdown into the dialect of Python-Markdown, which MkDocs uses.

The texts are written for GitHub. Python-Markdown differs in three ways that matter:
what belongs to an item of a list is indented by four columns, a list needs an empty
line in front, and a `<details>` block isn't parsed inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ITEM = re.compile(r"( *)((?:[-*]|\d+\.) +)(?=\S)")
_FENCE = re.compile(r" *(```+|~~~+)")
_DETAILS = re.compile(r"( *)<details>\s*(<summary>.*)?$")
_SUMMARY = re.compile(r" *<summary>(.*?)</summary>\s*$")
_TAGS = re.compile(r"</?(?:b|i|strong|em)>")
_LIST = 4


def rewrite(text: str) -> str:
    """Return the same text in the dialect of Python-Markdown."""
    return "\n".join(_block(text.splitlines())) + "\n"


def _block(lines: list[str]) -> list[str]:
    return _lists(_details(_quotes(lines)))


def _quotes(lines: list[str]) -> list[str]:
    """Rewrite the inside of each quotation."""
    done: list[str] = []
    quoted: list[str] = []
    fence = ""
    for line in [*lines, ""]:
        if not fence and re.match(r" *>", line):
            quoted.append(line)
            continue
        if quoted:
            pad = re.match(r" *", quoted[0])[0]  # type: ignore[index]
            inner = [re.sub(r"^ *> ?", "", one) for one in quoted]
            done += [f"{pad}> {one}".rstrip() for one in _block(inner)]
            quoted = []
        fence = _fence_after(fence, line)
        done.append(line)
    return done[:-1]


def _details(lines: list[str]) -> list[str]:
    """Turn `<details>` into the block of pymdownx.details, whose inside is parsed."""
    done: list[str] = []
    rows = iter(lines)
    fence = ""
    for line in rows:
        fence = _fence_after(fence, line)
        begins = _DETAILS.match(line)
        if fence or not begins:
            done.append(line)
            continue
        pad, summary = begins[1], begins[2] or next(rows, "")
        while "<summary>" in summary and "</summary>" not in summary:
            summary += " " + next(rows, "</summary>").strip()  # it has several lines
        title = (_SUMMARY.match(summary) or ["", "More"])[1]
        title = re.sub(r"</?code>", "`", _TAGS.sub("", title)).replace('"', "'")
        inner = _until_closed(rows, len(pad))
        done += ["", f'{pad}??? note "{title}"', ""]
        done += [f"{pad}    {one}".rstrip() for one in _block(inner)]
        done.append("")
    return done


def _until_closed(rows: Iterable[str], pad: int) -> list[str]:
    inner: list[str] = []
    for line in rows:
        if line.strip() == "</details>":
            break
        inner.append(line[pad:] if not line[:pad].strip() else line)
    return inner


def _lists(lines: list[str]) -> list[str]:
    """Indent what belongs to an item of a list by four columns a level."""
    done: list[str] = []
    columns: list[int] = []  # where the content of each open item begins
    fence, was_blank = "", True
    for line in lines:
        if not line.strip():
            done.append("")
            was_blank = True
            continue
        indent = len(line) - len(line.lstrip(" "))
        item = None if fence else _ITEM.match(line)
        if not fence and (was_blank or item):
            while columns and indent < columns[-1]:
                columns.pop()
        inside = columns[-1] if columns else 0
        begins = item is not None and indent - inside < _LIST
        body = line[inside:] if not line[:inside].strip() else line.lstrip()
        if begins and not was_blank and not _is_item(done[-1]) and not columns:
            done.append("")
        done.append(" " * _LIST * len(columns) + body)
        if begins and item:
            columns.append(len(item[1]) + len(item[2]))
        fence = _fence_after(fence, line)
        was_blank = False
    return done


def _is_item(line: str) -> bool:
    return bool(_ITEM.match(line)) or line.startswith(" ")


def _fence_after(fence: str, line: str) -> str:
    """Return the fence that is open after this line, or nothing."""
    found = _FENCE.match(line)
    if not found:
        return fence
    if not fence:
        return found[1]
    return "" if found[1].startswith(fence) else fence
