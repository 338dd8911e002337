"""Templates from solutions, written only over files that nobody has edited.

The digests of all templates that were ever generated stand in `solutions/pristine.txt`,
so that an old template can be renewed and a learner's file is never written over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from distlab.curriculum.clauses import fill_docstrings, fill_guide
from distlab.curriculum.manifest import Curriculum
from distlab.curriculum.regions import make_template
from distlab.curriculum.tables import fill_contents, fill_readme, fill_time_table

State = Literal["current", "outdated", "missing", "edited"]


@dataclass(frozen=True, kw_only=True)
class TemplateFile:
    """One template as it should be, and what is on disk."""

    path: Path
    text: str
    state: State


def template_files(curriculum: Curriculum) -> list[TemplateFile]:
    """Every unit's template, and whether the file on disk is that.

    Raises:
        RegionError: a solution's markers are wrong.
    """
    known = _known(curriculum)
    files = []
    for unit in curriculum.units.values():
        text = make_template(unit.solution(curriculum.root).read_text(encoding="utf-8"))
        path = unit.template(curriculum.root)
        files.append(
            TemplateFile(path=path, text=text, state=_state(path, text, known))
        )
    return files


def reworded(curriculum: Curriculum) -> dict[Path, str]:
    """The texts that don't repeat the manifest word for word, as they should be.

    These are the clauses in solutions and guide pages, and the tables of tasks.

    Raises:
        RegionError: a solution's markers are wrong.
        CurriculumError: a solution names a clause that its task doesn't have.
    """
    root = curriculum.root
    fills: dict[Path, Callable[[str], str]] = {}
    for phase in curriculum.phases:
        for unit in phase.units:
            fills[unit.solution(root)] = partial(fill_docstrings, unit=unit)
            fills[unit.guide(root)] = partial(fill_guide, unit=unit)
        guidelines = root / phase.folder / "guidelines.md"
        fills[guidelines] = partial(fill_time_table, phase=phase)
    fills[root / "docs" / "contents.md"] = partial(fill_contents, curriculum=curriculum)
    fills[root / "README.md"] = partial(fill_readme, curriculum=curriculum)
    found = {}
    for path, fill in fills.items():
        if path.is_file():  # a course that came with the wheel has no docs/
            text = path.read_text(encoding="utf-8")
            if (wanted := fill(text)) != text:
                found[path] = wanted
    return found


def write_templates(curriculum: Curriculum, files: list[TemplateFile]) -> None:
    """Write what is missing or outdated, and note the digests."""
    for file in files:
        if file.state in ("missing", "outdated"):
            file.path.write_text(file.text, encoding="utf-8")
    digests = _known(curriculum) | {_digest(file.text) for file in files}
    _list(curriculum).write_text(
        "".join(f"{digest}\n" for digest in sorted(digests)), encoding="utf-8"
    )


def _state(path: Path, text: str, known: set[str]) -> State:
    try:
        found = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "missing"
    except UnicodeDecodeError:
        return "edited"
    if found == text:
        return "current"
    return "outdated" if _digest(found) in known else "edited"


def _known(curriculum: Curriculum) -> set[str]:
    path = _list(curriculum)
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def _list(curriculum: Curriculum) -> Path:
    return curriculum.root / "solutions" / "pristine.txt"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
