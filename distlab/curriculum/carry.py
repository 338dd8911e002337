"""A learner's code into a newer template: by function, and nothing is thrown away.

Of every function that was a hole the learner's body is taken, from after the docstring
to its end, and put under the new head. What the learner added around the functions
(imports, helpers, constants) comes along. What has no place any more is named, and
stands in the old file, which the caller keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from distlab.curriculum.functions import body_line, find_function, span_of
from distlab.curriculum.regions import functions_of, make_template

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(kw_only=True)
class Carried:
    """The new text, and what the learner should know about it."""

    text: str
    carried: list[str] = field(default_factory=list)  # ids of tasks
    heads: list[str] = field(default_factory=list)  # tasks whose head is another one
    added: list[str] = field(default_factory=list)  # names that came along
    lost: list[str] = field(default_factory=list)  # names without a place


def carry(mine: str, solution: str) -> Carried:
    """Put the learner's code of `mine` into the template of `solution`.

    Raises:
        SyntaxError: `mine` is not Python.
    """
    template = make_template(solution)
    result = Carried(text=template)
    own, new = ast.parse(mine), ast.parse(template)
    holes = functions_of(solution)
    edits: list[tuple[int, int, list[str]]] = []
    for task, names in holes.items():
        for name in names:
            edit = _body(name, task, own, new, mine, template, result)
            if edit:
                edits.append(edit)
    in_holes = {name for names in holes.values() for name in names}
    edits += _additions(own, new, mine, template, result, in_holes)
    result.text = _edited(template, edits)
    ast.parse(result.text)
    return result


def is_current(mine: str, solution: str) -> bool:
    """Whether all that the template gives stands in `mine`, in its order.

    Raises:
        SyntaxError: `mine` is not Python.
    """
    template = make_template(solution)
    own, new = ast.parse(mine), ast.parse(template)
    filled: set[int] = set()
    for task, names in functions_of(solution).items():
        for name in names:
            theirs, fresh = find_function(own, name), find_function(new, name)
            assert fresh is not None, name
            if theirs is not None and not _is_untouched(theirs, task):
                start = _body_start(fresh, template)
                filled |= set(range(start, (fresh.end_lineno or start) + 1))
    given = [
        line
        for number, line in enumerate(template.splitlines(), 1)
        if number not in filled and line.strip()
    ]
    lines = iter(mine.splitlines())
    return all(line in lines for line in given)


def _body(
    name: str,
    task: str,
    own: ast.Module,
    new: ast.Module,
    mine: str,
    template: str,
    result: Carried,
) -> tuple[int, int, list[str]] | None:
    """Lines of the template to replace, by the learner's body of this function."""
    theirs, fresh = find_function(own, name), find_function(new, name)
    assert fresh is not None, name
    if theirs is None or _is_untouched(theirs, task):
        return None
    if _head(theirs) != _head(fresh) and task not in result.heads:
        result.heads.append(task)
    if task not in result.carried:
        result.carried.append(task)
    body = _lines(mine)[_body_start(theirs, mine) - 1 : _body_end(theirs, mine)]
    return _body_start(fresh, template), fresh.end_lineno or 0, _with_end(body)


def _body_start(node: ast.FunctionDef, text: str) -> int:
    """The first line below the docstring; comments above the first statement count."""
    first = body_line(node)
    if ast.get_docstring(node, clean=False) is None:
        lines = _lines(text)
        head = _signature_end(node)
        while first - 1 > head and lines[first - 2].strip().startswith("#"):
            first -= 1
    return first


def _body_end(node: ast.FunctionDef, text: str) -> int:
    """The last line, with the comments of the same depth that follow."""
    lines, last = _lines(text), node.end_lineno or node.lineno
    for number in range(last, len(lines)):
        line = lines[number]
        depth = len(line) - len(line.lstrip())
        if line.strip() and not (
            line.lstrip().startswith("#") and depth > node.col_offset
        ):
            break
        if line.strip():
            last = number + 1
    return last


def _signature_end(node: ast.FunctionDef) -> int:
    ends = [a.end_lineno or 0 for a in ast.walk(node.args) if isinstance(a, ast.arg)]
    if node.returns:
        ends.append(node.returns.end_lineno or 0)
    return max([node.lineno, *ends])


def _head(node: ast.FunctionDef) -> tuple[str, str, str | None]:
    """Arguments, result and docstring: what a contract is written in."""
    returns = ast.dump(node.returns) if node.returns else ""
    return ast.dump(node.args), returns, ast.get_docstring(node, clean=False)


def _is_untouched(node: ast.FunctionDef, task: str) -> bool:
    """Whether nothing but the hole is in the body: then there is nothing to carry."""
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    call = body[0].exc
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "NotImplementedError"
        and [a.value for a in call.args if isinstance(a, ast.Constant)] == [task]
    )


# ── what stands around the functions ────────────────────────────────────────────────


def _additions(
    own: ast.Module,
    new: ast.Module,
    mine: str,
    template: str,
    result: Carried,
    in_holes: set[str],
) -> Iterator[tuple[int, int, list[str]]]:
    """The learner's statements that the template lacks, before what they preceded."""
    known = {ast.dump(node) for node in new.body}
    names = {name: node for node in new.body for name in _names(node)}
    waiting: list[ast.stmt] = []
    last_import = max(
        (n.end_lineno or 0 for n in new.body if isinstance(n, _IMPORTS)), default=0
    )
    for node in own.body:
        if ast.dump(node) in known or _is_docstring(node):
            anchor = next((n for n in new.body if ast.dump(n) == ast.dump(node)), None)
        elif isinstance(node, _IMPORTS):
            result.added += _names(node)
            block = _with_end(_lines(mine)[node.lineno - 1 : node.end_lineno])
            yield last_import + 1, last_import, block
            continue
        else:
            anchor = next((names[n] for n in _names(node) if n in names), None)
            if anchor is None:
                waiting.append(node)
                continue
            yield from _class_additions(node, anchor, mine, result, in_holes)
        if anchor is not None and waiting and isinstance(anchor, Definition):
            yield _insertion(waiting, _with_comments(anchor, template)[0], mine, result)
            waiting = []
    if waiting:
        end = len(_lines(template)) + 1
        yield _insertion(waiting, end, mine, result, at_end=True)


_IMPORTS = (ast.Import, ast.ImportFrom)


def _class_additions(
    node: ast.stmt,
    anchor: ast.stmt,
    mine: str,
    result: Carried,
    in_holes: set[str],
) -> Iterator[tuple[int, int, list[str]]]:
    """Methods that the learner added to a class; and what was changed and is lost."""
    if not isinstance(node, ast.ClassDef) or not isinstance(anchor, ast.ClassDef):
        if not set(_names(node)) & in_holes:
            result.lost += _names(node)
        return
    there = {name: inner for inner in anchor.body for name in _names(inner)}
    block: list[str] = []
    for inner in node.body:
        name = next(iter(_names(inner)), "")
        full = f"{node.name}.{name}"
        if full in in_holes or ast.dump(inner) in {ast.dump(n) for n in anchor.body}:
            continue
        if name and name not in there:
            result.added.append(full)
            first, last = _with_comments(inner, mine)
            block += ["\n", *_with_end(_lines(mine)[first - 1 : last])]
        elif not _is_docstring(inner):
            result.lost.append(full.rstrip("."))
    if block:
        end = anchor.end_lineno or anchor.lineno
        yield end + 1, end, block


def _insertion(
    nodes: list[ast.stmt],
    line: int,
    mine: str,
    result: Carried,
    *,
    at_end: bool = False,
) -> tuple[int, int, list[str]]:
    block: list[str] = []
    for node in nodes:
        result.added += _names(node) or ["a statement"]
        first, last = _with_comments(node, mine)
        gap = ["\n", "\n"] if isinstance(node, Definition) else []
        text = _with_end(_lines(mine)[first - 1 : last])
        block += [*gap, *text] if at_end else [*text, *gap]
    if not at_end and block[-1] != "\n":
        block += ["\n", "\n"]
    return line, line - 1, block


def _with_comments(node: ast.stmt, mine: str) -> tuple[int, int]:
    """The lines of a statement, with the comments right above it."""
    first, last = span_of_any(node)
    lines = _lines(mine)
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return first, last


def span_of_any(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement, with its decorators."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return span_of(node)
    return node.lineno, node.end_lineno or node.lineno


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [a.asname or a.name for a in node.names]
    if isinstance(node, ast.Assign):
        return [
            t.id for target in node.targets for t in ast.walk(target)
            if isinstance(t, ast.Name)
        ]  # fmt: skip
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _edited(text: str, edits: list[tuple[int, int, list[str]]]) -> str:
    """The text with line ranges (first, last; empty to insert) replaced, from below."""
    lines = _lines(text)
    numbered = sorted(enumerate(edits), key=lambda e: (e[1][0], e[1][1], e[0]))
    for _, (first, last, block) in reversed(numbered):
        lines[first - 1 : last] = block
    return "".join(lines)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _with_end(block: list[str]) -> list[str]:
    """The lines, the last one with an end: a file may lack it."""
    return [line if line.endswith("\n") else f"{line}\n" for line in block]
