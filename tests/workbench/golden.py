"""Keep the wording of each kind of output in one file, so that no test depends on it.

A test asserts what happened: a status, a clause, a rank, a line, a number, an exit
code. The sentences are kept in `tests/golden/<name>.txt`. After you change one, run
`pytest tests/workbench --regenerate-golden` and read the diff.
"""

from __future__ import annotations

import re

import pytest

from tests.workbench.course import ROOT

FOLDER = ROOT / "tests" / "golden"

# Everything that differs between machines or runs.
VARIES = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"[^\s`]+ -m distlab\b|[^\s`]+/bin/distlab\b"), "distlab"),
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (re.compile(r"/[\w./-]*/dt-[^/\s]+/t(?:/popen-gw\d+)?/[^/\s]+"), "<tmp>"),
    (re.compile(r"/tmp/[\w.-]+"), "<tmp>"),
    (re.compile(r"\b(?:127\.0\.0\.1|localhost):\d+"), "127.0.0.1:<port>"),
    (re.compile(r"\b(pid|process|port) \d+"), r"\1 <number>"),
    (re.compile(r"\b\d+(?:\.\d+)?(?= ?(?:ms|s|min)\b)"), "<time>"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


class Golden:
    """Compares texts with the files in `tests/golden`, or rewrites those files."""

    def __init__(self, regenerate: bool) -> None:
        self.regenerate = regenerate

    def __call__(self, name: str, text: str) -> None:
        """Compare `text` with `tests/golden/<name>.txt`."""
        for pattern, instead in VARIES:
            text = pattern.sub(instead, text)
        text = text.strip("\n") + "\n"
        path = FOLDER / f"{name}.txt"
        if self.regenerate:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.is_file():
            pytest.fail(f"no {path}: run pytest with --regenerate-golden, and read it")
        assert text == path.read_text(encoding="utf-8"), (
            "worded differently: read both; if this is meant, --regenerate-golden"
        )
