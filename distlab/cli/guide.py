"""`distlab guide`: open a task's page, in the site if it is built."""

from __future__ import annotations

import re
from pathlib import Path

from distlab.cli.screen import show
from distlab.cli.trace import open_page
from distlab.curriculum import Curriculum, Progress, Task, load_curriculum
from distlab.curriculum.path import current_task
from distlab.paths import shown

SITE = "site"


def guide(name: str = "") -> int:
    """Open the page that explains a task or a unit, or say where it is.

    Raises:
        CurriculumError: there is no task or unit with this name.
    """
    curriculum = load_curriculum()
    unit, task = _asked(curriculum, name)
    page = curriculum.units[unit].guide(curriculum.root)
    built = built_page(curriculum.root, page)
    anchor = f"#{anchor_of(f'{task.number} {task.id}')}" if task else ""
    if built.is_file():
        show([("plain", f"{shown(built)}{anchor}")])
        open_page(built, anchor)
        return 0
    line = _line_of(page, task)
    show([("plain", f"{shown(page)}:{line}")])
    if (curriculum.root / "Makefile").is_file():
        show([("dim", "build the site with `make docs` to open the page there")])
    return 0


def built_page(root: Path, page: Path) -> Path:
    """Return where the site has a page of the repository."""
    return (root / SITE / page.relative_to(root)).with_suffix(".html")


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def _asked(curriculum: Curriculum, name: str) -> tuple[str, Task | None]:
    if name in curriculum.units:
        return name, None
    if name:
        task = curriculum.task(name)
    else:
        task = current_task(curriculum, Progress(curriculum.root))
    return task.unit, task


def _line_of(page: Path, task: Task | None) -> int:
    """Return the line where the section of the task begins."""
    lines = page.read_text(encoding="utf-8").splitlines()
    heading = f"### {task.number} {task.id}" if task else lines[0]
    return lines.index(heading) + 1 if heading in lines else 1
