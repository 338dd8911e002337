"""The hints of a task: four levels, each deeper than the one before."""

from __future__ import annotations

import re

from distlab.curriculum.manifest import Curriculum, Task

LEVELS = ("question", "principle", "steps", "near-code")


def read_hints(curriculum: Curriculum, task: Task) -> dict[int, str]:
    """All hints of a task, by level."""
    path = curriculum.units[task.unit].hints(curriculum.root)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    for name, body in zip(sections[1::2], sections[2::2], strict=True):
        if name.strip() == task.name:
            levels = re.split(r"^### (\d).*$", body, flags=re.MULTILINE)
            numbered = zip(levels[1::2], levels[2::2], strict=True)
            return {int(number): text.strip("\n") for number, text in numbered}
    return {}
