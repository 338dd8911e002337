"""Change random sentences in a copy: `python -m tests.reword 50 --seed 7`.

An editor may change any sentence without breaking a test. To see whether that holds, we
put a word between two others, in messages of the program and in texts that a learner
reads. Then `make templates` writes what is generated, and `make test` shows which tests
break: only golden files should.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORD = "indeed"
BETWEEN = re.compile(
    r"(?<=[ ][a-z]{2} )(?=[a-z]{3,} [a-z])|(?<=[a-z]{4} )(?=[a-z]{3,} [a-z])"
)
"""A place between two plain words of a sentence, and another word follows."""
TEXTS = ("docs/*.md", "phase*/guide/*.md", "phase*/hints/*.md", "README.md",
         "distlab/curriculum/misconceptions/*.toml", "curriculum.toml")  # fmt: skip
GENERATED = re.compile(r"<!-- distlab [^>]*-->.*?<!-- end -->", re.DOTALL)


class Place(NamedTuple):
    """Where a word may go: so many characters from the beginning of the file."""

    path: Path
    offset: int


def messages(path: Path) -> Iterator[Place]:
    """The sentences in a module's strings, without its docstrings."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    documented = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.STRING and token.start not in documented:
                start = starts[token.start[0] - 1] + token.start[1]
                for found in BETWEEN.finditer(outside_braces(token.string)):
                    yield Place(path, start + found.start())
                    break


def outside_braces(literal: str) -> str:
    """The literal; what an f-string computes is replaced, at the same length."""
    if "f" not in literal[:2].lower():
        return literal
    return re.sub(r"\{[^{}]*\}", lambda found: "#" * len(found[0]), literal)


def sentences(path: Path) -> Iterator[Place]:
    """The sentences of a page, without what is generated, code and drawings."""
    text = path.read_text(encoding="utf-8")
    hidden = [found.span() for found in GENERATED.finditer(text)]
    hidden += [
        found.span() for found in re.finditer(r"```.*?```|`[^`]*`", text, re.DOTALL)
    ]
    offset = 0
    for line in text.splitlines(keepends=True):
        is_prose = line[:1].isalpha() or line.startswith(("text", "title", "C", "- "))
        for found in BETWEEN.finditer(line) if is_prose else ():
            place = offset + found.start()
            if not any(start <= place < end for start, end in hidden):
                yield Place(path, place)
                break
        offset += len(line)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("count", type=int)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT).returncode:
        sys.exit(
            "tests.reword: there are changes in the working tree; use a fresh clone"
        )
    modules = sorted((ROOT / "distlab").rglob("*.py"))
    pages = sorted(page for pattern in TEXTS for page in ROOT.glob(pattern))
    draw = random.Random(chosen.seed)
    half = chosen.count // 2
    places = draw.sample([p for m in modules for p in messages(m)], half)
    places += draw.sample([p for m in pages for p in sentences(m)], chosen.count - half)
    for path, offset in sorted(places, reverse=True):
        text = path.read_text(encoding="utf-8")
        path.write_text(f"{text[:offset]}{WORD} {text[offset:]}", encoding="utf-8")
        before = text[text.rfind("\n", 0, offset) + 1 : offset].strip()
        print(f"{path.relative_to(ROOT)}: {before[-50:]} [{WORD}]")


if __name__ == "__main__":
    main()
