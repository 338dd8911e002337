"""What `distlab sim` and `distlab scale` can run: a task, a unit's function, a file's.

A function gets its arguments by their names: `comm`, tensors, a model, a source rank.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.curriculum import (
    Curriculum,
    CurriculumError,
    SourceError,
    UnitSource,
    read_source,
)
from distlab.curriculum.choose import Choice, chosen_unit
from distlab.curriculum.functions import find_function
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import expect_a_text_file, travelling
from distlab.simulated.play import FILLED

PLAYED = {"distributed_data_parallel": "distlab.walkthroughs.bucket_lanes:play"}
"""For units that are no functions of a comm: what runs the unit as a whole."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Functions of one file, to be called one after another on every rank."""

    title: str
    source: UnitSource
    reference: UnitSource
    grafts: tuple[str, ...]
    functions: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """What travels to the process in which it is run."""
        return {
            "source": travelling(self.source),
            "reference": travelling(self.reference),
            "grafts": list(self.grafts),
            "functions": list(self.functions),
        }


def find_target(curriculum: Curriculum, name: str, code: str = "") -> Target:
    """The target called `name`: 1.4, collectives.all_reduce, unit:function, FILE:FUNC.

    What is unfinished in a unit is the reference's.

    Raises:
        ValueError: there is no such thing, or it takes what cannot be made up.
        SourceError: the file cannot be read or parsed.
    """
    if name.endswith(".py"):
        name += ":"  # the complaint says which functions it has
    file, _, function = name.rpartition(":")
    if file and file not in curriculum.units:
        return _in_file(Path(file), function)
    if file:
        return _in_unit(curriculum, file, (function,), f"{file}.{function}", code)
    if name in curriculum.units:
        known = ", ".join(t.id for t in curriculum.units[name].tasks)
        raise ValueError(f"{name} is a unit; name one of its tasks: {known}")
    try:
        task = curriculum.task(name)
    except CurriculumError as error:
        raise ValueError(
            f"{error}; a function of a file is FILE.py:FUNCTION"
        ) from error
    reference = read_source(curriculum, curriculum.units[task.unit], "reference")
    functions = functions_of(reference.text)[task.id]
    title = f"{task.number} {task.id}"
    return _in_unit(curriculum, task.unit, functions, title, code)


def _in_unit(
    curriculum: Curriculum, unit: str, functions: tuple[str, ...], title: str, code: str
) -> Target:
    if code != "reference":
        choice = chosen_unit(curriculum, unit, "mine")
        source, reference, grafts = choice.source, choice.reference, choice.grafts
        if code == "mine" and not _are_mine(choice, functions):
            raise ValueError(f"you haven't written {title} yet")
        whose = "yours" if _are_mine(choice, functions) else "the reference's"
    else:
        reference = read_source(curriculum, curriculum.units[unit], "reference")
        source, grafts, whose = reference, (), "the reference's"
    if unit in PLAYED:
        functions = (PLAYED[unit],)
    else:
        for function in functions:
            _require_fillable(reference, function)
    return Target(
        title=f"{title}, {whose}",
        source=source,
        reference=reference,
        grafts=grafts,
        functions=functions,
    )


def _are_mine(choice: Choice, functions: tuple[str, ...]) -> bool:
    of_tasks = functions_of(choice.reference.text)
    mine = [part.task for part in choice.parts if part.whose == "mine"]
    return any(name in functions for task in mine for name in of_tasks[task])


def _in_file(path: Path, function: str) -> Target:
    try:
        expect_a_text_file(path)
        text = path.read_text(encoding="utf-8-sig")
    except SourceError as error:
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error
    source = UnitSource(path.stem, "file", path.resolve(), text)
    try:
        _require_fillable(source, function)
    except SourceError as error:
        raise ValueError(f"{path}: {error}") from error
    return Target(
        title=f"{path.name}:{function}",
        source=source,
        reference=source,
        grafts=(),
        functions=(function,),
    )


def _require_fillable(source: UnitSource, function: str) -> None:
    node = find_function(source.tree, function)
    if node is None:
        there = [n.name for n in source.tree.body if isinstance(n, ast.FunctionDef)]
        known = ", ".join(n for n in there if not n.startswith("_")) or "no function"
        lacks = f"has no {function}" if function else "needs a function, FILE.py:NAME"
        raise ValueError(f"{source.path.name} {lacks}; it has {known}")
    given = [*node.args.posonlyargs, *node.args.args]
    required = given[: len(given) - len(node.args.defaults)]
    required += [
        argument
        for argument, default in zip(
            node.args.kwonlyargs, node.args.kw_defaults, strict=True
        )
        if default is None
    ]
    names = [argument.arg for argument in required]
    if not {"comm", "context", "levels"} & set(names):
        raise ValueError(f"{function} doesn't take comm, so no rank can send anything")
    unknown = [name for name in names if name not in FILLED]
    if unknown:
        raise ValueError(
            f"{function} takes {unknown[0]}, and nothing is known to put there; known "
            f"are {', '.join(FILLED)}; or give it a default"
        )
