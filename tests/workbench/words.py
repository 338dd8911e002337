"""The words that learners' texts do not use, and what they say instead.

GLOSSARY.md says which term is used for what. This list holds what crept in before it
was there: words of our own where the field has a term, and turns of phrase that are not
plain modern English. A pattern is matched without regard to case.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

WORDS = {
    r"islands?": "node",
    r"box(es)?": "receive buffer",
    r"passages?": "the operator's name",
    r"summands?": "partial sum, element",
    r"whole numbers?": "integer",
    r"ways? (in|out)(?! (of|which))": "link, or the operator's name",
    r"fore(tell|tells|told|telling)": "predict",
    r"(too |very |so |as )dear|dear(er|est)": "expensive",
    r"oftener": "more often",
    r"whoever": "the rank that …",
    r"nobody|no one": "no rank, nothing",
    r"everybody|everyone": "every rank",
    r"by way of": "through, with",
    r"at home": "locally",
    r"as it was": "unchanged",
    r"of (its|one's|their) own": "its own …",
    r"that is it": "already plain torch",
    r"an? [nvkp](-th|th)\b": "1/n of",
    r"hand(s|ed|ing)? (out|round|back)": "return, scatter, gather",
    r"shar(e|es|ed|ing) out": "shard, distribute",
    r"fell from the sky": "a leaf tensor",
    r"outstretched": "blocked in send",
    r"crowd(s|ed|ing)?": "oversubscribe",
    r"for ever": "forever",
    r"neighbours?|colours?|behaviours?|favours?|grey": "American spelling",
    r"fuss": "…",
    r"is there twice": "is repeated",
    r"letter ?box": "…",
    r"one process's": "the single-process baseline's",
    r"one process alone": "a single process",
    r"what (was|is) made": "the output",
    r"thrown away": "discarded",
}
IDENTIFIERS = {
    "box": "recv_buffer",
    "boxes": "recv_buffers",
    "found": "results",
    "island": "node",
    "islands": "nodes",
    "lane": "rail",
    "lanes": "rails",
    "like": "example",
    "made": "output",
    "news": "usage_work",
    "piece": "shard_range",
    "pieces": "shard_ranges",
    "place": "offset, local_rank",
    "tell_ranks": "all_reduce_usage",
    "told": "report",
    "whole": "full",
    "Column": "ColumnParallelLinear",
    "ColumnLinear": "ColumnParallelLinear",
    "LinearShare": "ParallelLinear",
    "Maker": "OptimizerFactory",
    "Passage": "copy_to_region",
    "Piece": "ShardRange",
    "RowLinear": "RowParallelLinear",
    "Team": "power-of-two fold",
    "cut": "shard, split",
    "vocab_loss": "vocab_parallel_cross_entropy",
    "scatter_tokens": "reduce_scatter_to_sequence",
    "sum_whole_gradients": "all_reduce_replicated_grads",
}
_PATTERNS = {
    re.compile(rf"\b(?:{word})\b", re.IGNORECASE): say for word, say in WORDS.items()
}


class Use(NamedTuple):
    """One word that should not be there: where, what, and what to say instead."""

    line: int
    word: str
    say: str


def words_in(text: str) -> list[Use]:
    """Every use of a word of the list, in order; two lines are read as one."""
    uses = []
    flat = re.sub(r"\s", " ", text)
    for pattern, say in _PATTERNS.items():
        for match in pattern.finditer(flat):
            line = text.count("\n", 0, match.start()) + 1
            uses.append(Use(line, match[0], say))
    return sorted(uses)


def identifiers_in(source: str) -> list[Use]:
    """Names that a file of Python defines, or uses for arguments, and should not."""
    uses = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name in IDENTIFIERS:
            uses.add(Use(node.lineno, name, IDENTIFIERS[name]))
    return sorted(uses)


def text_of(path: Path) -> str:
    """What a learner reads of a file: a notebook's cells, a picture's words, or all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    if path.suffix == ".svg":
        return re.sub(r"<[^>]*>", "\n", text)
    return text


def messages_of(path: Path) -> str:
    """The sentences in a file of Python: its strings, but not its docstrings."""
    text = path.read_text(encoding="utf-8")
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    lines = [""] * (text.count("\n") + 2)
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            lines[node.lineno - 1] += " " + node.value.replace("\n", " ")
    return "\n".join(lines)


def titles_of(path: Path) -> str:
    """The titles of a catalogue, which the hunts show."""
    return "\n".join(
        line if line.startswith("title") else ""
        for line in path.read_text(encoding="utf-8").splitlines()
    )
