"""Count the assertions on prose: `python -m tests.prose [files]`; `--list` names them.

An assertion on prose is one that an editor breaks by changing a sentence: a string of
three or more words, at least two of them plain lower-case words, compared with a text
(`in`, `==`, `startswith`, `match=`). Names aren't prose, so a flag, a path, a slug,
"rank 2" or a number may be asserted freely.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT_METHODS = {"startswith", "endswith", "count", "index", "find"}
SEARCHES = {"search", "match", "fullmatch", "findall"}


def is_prose(text: str) -> bool:
    words = re.sub(r"\\[bsdwSDW]|\\.|[.,:;!?*+^$()'\"]", " ", text).split()
    plain = [word for word in words if re.fullmatch(r"[a-z]{2,}", word)]
    return len(words) >= 3 and len(plain) >= 2 and "\n" not in text.strip("\n")


def strings(node: ast.AST) -> Iterator[ast.Constant]:
    """The literals in an expression, f-strings' parts among them."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part


def compared(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions that an assertion compares with a text."""
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        yield from (side for side in sides if not isinstance(side, ast.Call))
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in TEXT_METHODS | SEARCHES
    ):
        yield from node.args


def texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every literal that a test compares with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                for side in compared(part):
                    yield from strings(side)
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield from strings(node.value)


def prose_in(path: Path) -> list[ast.Constant]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {id(text): text for text in texts(tree) if is_prose(text.value)}
    return sorted(found.values(), key=lambda text: text.lineno)


def main(arguments: list[str]) -> None:
    listed = "--list" in arguments
    named = [Path(name) for name in arguments if name != "--list"]
    total = 0
    for path in named or sorted((ROOT / "tests").rglob("*.py")):
        found = prose_in(path)
        total += len(found)
        for text in found if listed else ():
            print(f"{path}:{text.lineno}: {text.value!r}")
        if found and not listed:
            print(f"{len(found):4d}  {path}")
    print(f"{total:4d}  assertions on prose")


if __name__ == "__main__":
    main(sys.argv[1:])
