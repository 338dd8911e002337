"""Texts as learners might hand them in, and the verdict on them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from distlab.curriculum import load_curriculum, make_template
from distlab.grading import TaskVerdict
from distlab.grading.catalogue import Entry, read_catalogue
from distlab.grading.grade import Grader
from distlab.runner import Cluster

ROOT = Path(__file__).parents[2]
CURRICULUM = load_curriculum(ROOT)
UNITS = CURRICULUM.units
SEED = 7


def solution_of(unit: str) -> str:
    return UNITS[unit].solution(ROOT).read_text(encoding="utf-8")


def with_hole(text: str, task_id: str) -> str:
    """The solution in which one region is what the template has there."""
    lines, inside = [], ""
    for line in text.splitlines(keepends=True):
        mark = re.match(r" *### (BEGIN SOLUTION ([\w.]+)|END SOLUTION)\n", line)
        if mark and mark[2]:
            inside = mark[2]
        if not mark or inside == task_id:
            lines.append(line)
    return make_template("".join(lines))


def with_body(text: str, task_id: str, body: str, function: str = "") -> str:
    entry = Entry(id="", task=task_id, title="", body=body, function=function)
    return entry.applied_to(text)


def verdict_on(
    cluster: Cluster,
    folder: Path,
    task_id: str,
    text: str | bytes | None,
    *,
    worlds: Sequence[int] = (3,),
    exit_code: int | None = None,
) -> TaskVerdict:
    """The verdict on `text` as the unit of a task; None hands in no file at all."""
    task = CURRICULUM.task(task_id)
    path = folder / f"{task.unit}.py"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    grader = Grader(
        CURRICULUM, cluster, code=str(path), seed=SEED, worlds=tuple(worlds)
    )
    report = grader.grade([task])
    if exit_code is not None:
        assert report.exit_code == exit_code
    return report.tasks[0]


@functools.cache
def catalogue() -> dict[str, Entry]:
    """The catalogue of wrong and of right solutions, by name."""
    return {entry.id: entry for entry in read_catalogue(CURRICULUM)}


def verdict_on_entry(
    cluster: Cluster, folder: Path, name: str, *, worlds: Sequence[int] = ()
) -> TaskVerdict:
    """The verdict on one of the catalogue; without `worlds`, at the usual ones."""
    entry = catalogue()[name]
    text = entry.applied_to(solution_of(entry.unit))
    return verdict_on(cluster, folder, entry.task, text, worlds=worlds)
